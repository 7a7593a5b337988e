"""`python -m jax_gg`: what a bug report needs, and whether `gmm` computes right here.

Exits with 1 where it does not.
"""

import collections
import platform
import sys
from importlib import metadata

import jax

from jax_gg import _jax_gg, _selfcheck

_PACKAGES = ("jax-gg", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy", "scipy")


def main() -> int:
    """Prints all of it; returns the exit code."""
    for package in _PACKAGES:
        try:
            _print(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    _print("Python", f"{platform.python_version()} ({platform.python_implementation()})")
    _print("OS", platform.platform())
    _print("kernels", _kernels())
    try:
        devices = jax.devices()
    except Exception as e:  # RuntimeError, or AssertionError where JAX knows the platform but finds no device of it
        _print("devices", f"none: {_one_line(e)}")
        print("\nself-check: FAILED, as JAX has no device to run it on")
        return 1
    seen = collections.Counter(f"{d.platform} ({d.device_kind})" for d in devices)
    _print("devices", ", ".join(f"{count} x {kind}" for kind, count in seen.items()))
    return _self_check()


def _self_check() -> int:
    try:
        device, checks = _selfcheck.run()
    except Exception as e:  # whatever it is belongs into the report
        print(f"\nself-check: FAILED with {_one_line(e)}")
        return 1
    print(f"\nself-check of gmm on {device.platform}:{device.id}, error relative to NumPy in float64")
    for c in checks:
        verdict = "ok" if c.ok else "FAILED" if c.zeros else "FAILED: not zero past the sum or in an empty group"
        print(f"  {c.dtype:8}  {c.result:4}  {c.error:7.1e}  allowed {c.allowed:7.1e}  {verdict}")
    ok = all(c.ok for c in checks)
    print(f"self-check: {'passed' if ok else 'FAILED'}")
    return 0 if ok else 1


def _kernels() -> str:
    built_for = {"cpu": "CPU", "CUDA": f"CUDA ({_jax_gg.cuda_built_for()})"}
    if not _jax_gg.cuda_built_for():
        built_for["CUDA"] = "no CUDA"
    return ", ".join(built_for[platform] for platform in _jax_gg.registrations())


def _print(name: str, value: str) -> None:
    print(f"{name:17}  {value}")


def _one_line(e: Exception) -> str:
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


if __name__ == "__main__":
    sys.exit(main())
