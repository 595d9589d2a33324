"""Only what pyproject.toml cannot say: where cffi finds the extension, and that one wheel serves every Python."""

from setuptools import setup

setup(
    cffi_modules=["build_ffi.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # cffi builds against the stable ABI
)
