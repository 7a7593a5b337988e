"""The version of the installed package."""

from importlib import metadata

__version__ = metadata.version("jax-gg")
