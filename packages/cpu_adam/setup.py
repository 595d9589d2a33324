"""Only what pyproject.toml cannot say: where cffi finds the extension module."""

from setuptools import setup

setup(cffi_modules=["build_ffi.py:ffibuilder"])
