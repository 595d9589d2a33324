"""A drive's profile is found again by the drive, and obeyed where nothing else was asked for."""

from __future__ import annotations

import os

import pytest

import deepnvme
from deepnvme.drive_profile import DriveProfile, drive_key, load_profile, profile_directory, save_profile


@pytest.fixture(autouse=True)
def own_profiles(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPNVME_PROFILES", str(tmp_path / "profiles"))


@pytest.fixture
def device(tmp_path):
    return os.stat(tmp_path).st_dev


def test_round_trip(device):
    assert load_profile(device) is None
    profile = DriveProfile(drive_key(device), queue_depth=5, measured={"read": 1.5})
    path = save_profile(profile)
    assert path.parent == profile_directory()
    assert load_profile(device) == profile
    assert load_profile(device + 1) is None


def test_engine_uses_the_profile_of_its_first_file(tmp_path, device, backend):
    save_profile(DriveProfile(drive_key(device), queue_depth=5, block_size=128 << 10, bounce_buffers=3))
    with deepnvme.Engine(backend, block_size="64KiB") as io:
        assert io.write(tmp_path / "file", bytes(1_000_001)).wait() == 1_000_001
        assert (io.queue_depth, io.block_size, io.bounce_buffers) == (5, 64 << 10, 3)
        assert io.flush() == 1
    assert (tmp_path / "file").read_bytes() == bytes(1_000_001)


def test_what_was_asked_for_stays(tmp_path, device):
    save_profile(DriveProfile(drive_key(device), queue_depth=5, block_size=128 << 10, threads=2))
    with deepnvme.Engine(queue_depth=9, block_size=4096, threads=1, bounce_buffers=2) as io:
        io.write(tmp_path / "file", b"x").wait()
        assert (io.queue_depth, io.block_size, io.threads) == (9, 4096, 1)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"drive": "x", "unknown": 1}'])
def test_broken_profile_is_as_good_as_none(tmp_path, device, content):
    profile_directory().mkdir()
    (profile_directory() / f"{drive_key(device)}.json").write_text(content)
    with deepnvme.Engine() as io:
        assert io.write(tmp_path / "file", b"x").wait() == 1


@pytest.mark.parametrize(
    "settings",
    [{"queue_depth": "many"}, {"queue_depth": 0}, {"block_size": 1000}, {"threads": 3000}, {"bounce_buffers": 1.5}],
)
def test_profile_with_a_setting_that_makes_no_sense_is_not_used(tmp_path, device, settings):
    save_profile(DriveProfile(drive_key(device), **{"queue_depth": 5, **settings}))
    with deepnvme.Engine() as io:
        depth = io.queue_depth
        with pytest.warns(RuntimeWarning, match=f"profile of drive .* is not used: {next(iter(settings))}"):
            request = io.write(tmp_path / "file", b"x")
        assert request.wait() == 1
        assert io.write(tmp_path / "file", b"yz").wait() == 2
        assert io.queue_depth == depth


def test_profile_that_this_process_cannot_have_is_not_used(tmp_path, device, run_python, monkeypatch):
    save_profile(DriveProfile(drive_key(device), threads=200))
    run_python(
        """
        import resource, warnings, deepnvme
        io = deepnvme.Engine("io_uring")
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))  # 200 rings are 400 descriptors
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert io.write("file", b"xyz").wait() == 3
        assert any("is not used" in str(w.message) for w in told), told
        assert io.threads == 1
        """
    )


def test_filesystem_without_a_drive_has_a_key_too():
    assert drive_key(os.stat("/proc").st_dev).startswith("device-")
