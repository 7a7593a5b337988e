"""What the sdist and the wheel hold: what must be in them, and nothing that must not.

python check_packages.py SDIST WHEEL
"""

import pathlib
import sys
import tarfile
import zipfile

SDIST = {
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "PKG-INFO",
    "pyproject.toml",
    "CMakeLists.txt",
    "cpp",
    "jax_gg",
    "tests",
}
UNWANTED = {".ci", ".git", ".github", "build", "dist", "__pycache__", "results", ".venv", "train_moe_out"}


def check(what: str, ok: object) -> None:
    if not ok:
        sys.exit(f"check_packages: error: {what}")


def main(sdist: str, wheel: str) -> None:
    with tarfile.open(sdist) as archive:
        names = [pathlib.PurePath(*pathlib.PurePath(name).parts[1:]) for name in archive.getnames()]
    missing = SDIST - {name.parts[0] for name in names if name.parts}
    check(f"the sdist lacks {missing}", not missing)
    for name in names:
        check(f"the sdist holds {name}", not UNWANTED & set(name.parts) and name.suffix not in (".so", ".pyc"))

    tag = pathlib.Path(wheel).stem.split("-")[2:4]
    expected = ["cp312", "abi3"] if sys.version_info >= (3, 12) else [f"cp3{sys.version_info.minor}"] * 2
    check(f"the wheel's tag is {tag}, expected {expected}", tag == expected)
    version = pathlib.Path(wheel).name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: info.file_size for info in archive.infolist()}
    source = {str(name) for name in names if name.parts and name.parts[0] == "jax_gg" and name.suffix}
    info = {f"jax_gg-{version}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    modules = {name for name in files if name.startswith("jax_gg/_jax_gg.") and name.endswith(".so")}
    check(f"the wheel has extension modules {modules}, expected one", len(modules) == 1)
    difference = set(files) ^ (source | info | modules)
    check(f"the wheel and the sources differ in {difference}", not difference)
    print(
        f"{pathlib.Path(sdist).name}: {len(names)} files; {pathlib.Path(wheel).name}: {sum(files.values()) >> 10} KiB"
    )


main(*sys.argv[1:])
