"""The C core without Python: on ARM under qemu, and under the thread and address sanitizers.

tests/c/hashes.c is built from the same sources with the same flags as the extension (build_ffi.py).
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

import cpu_adam

PACKAGE = Path(__file__).parent.parent
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def compile_flags():
    specification = importlib.util.spec_from_file_location("build_ffi", PACKAGE / "build_ffi.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.COMPILE_ARGS


def build(folder, compiler, *flags):
    if not (PACKAGE / "csrc").is_dir():
        pytest.skip("the C sources do not lie beside these tests")
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    program = folder / "hashes"
    sources = [PACKAGE / "tests/c/hashes.c", *sorted((PACKAGE / "csrc").glob("*.c"))]
    command = [compiler, *compile_flags(), "-Wextra", *flags, f"-I{PACKAGE / 'csrc'}", *sources, "-lm", "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "-fsanitize" in "".join(flags) and "cannot find" in done.stderr:
        pytest.skip(f"{compiler} has no library for {' '.join(flags)}")
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"compiler warnings:\n{done.stderr}"
    return program


def run(*command):
    """form -> {isa: hash}"""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    hashes = {}
    for line in done.stdout.splitlines():
        form, isa, value = line.split()
        hashes.setdefault(form, {})[isa] = value
    return hashes


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return run(build(tmp_path_factory.mktemp("native"), "gcc"))


def test_every_instruction_set_gives_one_hash(native):
    for form, hashes in native.items():
        assert set(hashes) == set(cpu_adam.isas()), form
        assert len(set(hashes.values())) == 1, form


def test_arm_gives_the_same_bits(native, tmp_path):
    """NEON and the generic kernel under qemu-user, against this machine's results."""
    if shutil.which(ARM_EMULATOR) is None:
        pytest.skip(f"{ARM_EMULATOR} (qemu-user) is not installed")
    program = build(tmp_path, ARM_COMPILER, "-static")
    arm = run(ARM_EMULATOR, program)
    assert arm.keys() == native.keys()
    for form, hashes in arm.items():
        assert set(hashes) == {"neon", "generic"}
        assert set(hashes.values()) == set(native[form].values()), form


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_sanitizers(native, tmp_path, sanitizers):
    """Several callers with several thread counts at once: no race, no step past an end, no undefined behaviour."""
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g"]
    assert run(build(tmp_path, "gcc", *flags)) == native
