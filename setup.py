"""A shim for tools that still call it; all metadata is in pyproject.toml."""

from setuptools import setup

setup()
