"""What is installed, and what the README says about it."""

import pathlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import jax
import numpy as np
import pytest

import jax_gg

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def code_blocks(language: str) -> list[str]:
    """Without the indentation of those in lists."""
    blocks = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", README, re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in blocks]


def test_readme_code_runs():
    example, export = code_blocks("python")
    assert len(example.split("\n")) <= 7  # five, and what the formatter adds
    names = {}
    exec(example, names)
    np.testing.assert_array_equal(names["out"], [[4] * 8] * 5 + [[0] * 8])
    np.testing.assert_array_equal(names["grads"][:, 0, 0], [2, 0, 3])
    exec(export, names)
    assert names["exported"].out_avals[0].shape == (6, 8)


def test_readme_export_needs_what_it_says():
    names = {}
    exec(code_blocks("python")[0], names)
    with pytest.raises(ValueError, match="jax_gg_gmm"):
        jax.export.export(jax.jit(jax_gg.gmm))(names["tokens"], names["experts"], names["sizes"])


@pytest.mark.parametrize(
    "command", ['pip install ".[examples]" && python examples/train_moe.py', 'pip install ".[test]" && pytest']
)
def test_readme_commands(command):
    assert [command] in [block.splitlines() for block in code_blocks("sh")]


def test_readme_links():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(links) >= 3
    if not RESULTS.exists():  # an sdist has none
        links = [link for link in links if not link.startswith("benchmarks/results/")]
    for link in links:
        assert (ROOT / link).is_file(), link


@pytest.mark.skipif(not RESULTS.exists(), reason="an sdist has no results")
@pytest.mark.parametrize(("script", "results", "lines"), [("cpu.py", "cpu.jsonl", 12), ("gmm.py", "h200.jsonl", 30)])
def test_readme_tables(script, results, lines):
    """Every figure is one that was measured."""
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / script), "--readme", str(RESULTS / results)]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert len(table.splitlines()) == lines + 2
    assert table in README


def test_readme_versions():
    with open(ROOT / "pyproject.toml", "rb") as f:
        project = tomllib.load(f)["project"]
    assert project["requires-python"] == ">=3.11"
    assert "jax>=0.8.2" in project["dependencies"]
    assert "Python 3.11 or later and JAX 0.8.2 or later" in README
    assert project["version"] == metadata.version("jax-gg") == jax_gg.__version__


def test_types_are_installed():
    installed = pathlib.Path(jax_gg.__file__).parent
    assert (installed / "py.typed").is_file()
    stub = (installed / "_jax_gg.pyi").read_text()
    public = {name for name in dir(jax_gg._jax_gg) if not name.startswith("_")}
    assert set(re.findall(r"^def (\w+)", stub, re.MULTILINE)) == public


def test_wheel_tag():
    (tag,) = re.findall("^Tag: (.+)$", metadata.distribution("jax-gg").read_text("WHEEL"), re.MULTILINE)
    minor = sys.version_info.minor
    assert tag.startswith("cp312-abi3-" if minor >= 12 else f"cp3{minor}-cp3{minor}-")


def test_files_name_no_machine():
    """No home directory and no package index, which would be those of whoever wrote them."""
    folders = ("cpp", "jax_gg", "tests", "examples", "benchmarks", "docs", ".ci")
    files = [f for f in ROOT.iterdir() if f.is_file()]
    files += [f for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    files = [f for f in files if f.suffix not in (".png", ".pyc", ".so", ".gz")]
    assert len(files) > 40
    for f in files:
        found = re.search(r"/(home|root|Users)/\w|\b(pypi|pythonhosted)\.org\b", f.read_text(encoding="utf-8"))
        assert not found, f"{f.relative_to(ROOT)}: {found[0]}"
