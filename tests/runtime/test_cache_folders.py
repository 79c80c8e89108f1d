"""Cache folders that cannot be used, or that others may have written: a warning once, kernels in memory, no crash."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers_compile import ENTRY, kept_files, kernel_key, warnings_of

from flashsmith.runtime import cache as cache_module
from flashsmith.runtime import private_folder
from flashsmith.runtime.cache import FOLDER, Entry, KernelCache

KEY = kernel_key()

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are POSIX's")


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_warned", set())


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


# ---- Folders that cannot be used ----


def test_a_full_disk_warns_once_and_leaves_nothing(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = private_folder.write_new

    def write_new(path: Path, data: bytes) -> None:
        real(path, data[:10])
        if path.name == "kernel.cubin":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(private_folder, "write_new", write_new)
    assert not cache.store(KEY, ENTRY)
    assert not KernelCache(cache.root).store(KEY, ENTRY)
    assert kept_files(cache.root) == [FOLDER]
    (warning,) = warnings_of(caplog)
    assert "No space left" in warning
    assert "FLASHSMITH_CACHE_DIR" in warning


def test_a_full_tmpfs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], capture_output=True, check=False
    ).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        cache = KernelCache(mount / "cache")
        assert not cache.store(KEY, Entry(source="s", cubin=bytes(2 << 20), facts={}))
        assert kept_files(mount) == ["cache", f"cache/{FOLDER}"]
        assert "No space left" in warnings_of(caplog)[0]
        assert cache.store(KEY, ENTRY)  # a small one fits
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """HOME=/, mode 555 and another user's 0700 folder all end in EACCES; root is not held by modes, hence the mock."""

    def mkdir(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    cache = KernelCache(tmp_path / "cache")
    monkeypatch.setattr(os, "mkdir", mkdir)
    for _ in range(3):
        assert cache.load(KEY) is None
        assert not cache.store(KEY, ENTRY)
        with cache.lock(KEY, seconds=1) as held:
            assert not held
    assert len(warnings_of(caplog)) == 1


def test_a_readable_folder_that_is_not_writable_still_hits(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.store(KEY, ENTRY)

    def mkdir(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", mkdir)
    again = KernelCache(cache.root)
    assert again.load(KEY) is not None
    assert not again.store(kernel_key(spec="6" * 64), ENTRY)
    with again.lock(KEY, seconds=1) as held:
        assert not held
    assert len(warnings_of(caplog)) == 1


def test_a_file_in_place_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("")
    cache = KernelCache(tmp_path / "cache")
    assert cache.load(KEY) is None
    assert not cache.store(KEY, ENTRY)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("place", ["root", "folder"])
def test_a_folder_others_may_write_is_refused(cache: KernelCache, place: str, caplog: pytest.LogCaptureFixture) -> None:
    cache.store(KEY, ENTRY)
    path = cache.root if place == "root" else cache.folder
    path.chmod(0o777)
    again = KernelCache(cache.root)
    assert again.load(KEY) is None
    assert not again.store(KEY, ENTRY)
    assert again.entries() == []
    (warning,) = warnings_of(caplog)
    assert f"chmod go-w '{path}'" in warning
    path.chmod(0o700)
    assert KernelCache(cache.root).load(KEY) is not None


@pytest.mark.parametrize("mode", [0o1777, 0o775])
def test_a_shared_root_holds_a_private_folder(cache: KernelCache, mode: int) -> None:
    cache.root.mkdir()
    cache.root.chmod(mode)
    assert cache.store(KEY, ENTRY)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert cache.load(KEY) is not None


def test_another_users_folder_is_refused(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.store(KEY, ENTRY)
    owner = cache.root.stat().st_uid or 65534
    if os.geteuid() == 0:
        os.chown(cache.root, owner, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    again = KernelCache(cache.root)
    assert again.load(KEY) is None
    assert not again.store(KEY, ENTRY)
    (warning,) = warnings_of(caplog)
    assert f"uid {owner}" in warning


def test_a_planted_link_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A link that another user made in a shared folder, towards a folder of ours."""
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's link")
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(ours)
    os.chown(tmp_path / "cache", 65534, -1, follow_symlinks=False)
    cache = KernelCache(tmp_path / "cache")
    assert not cache.store(KEY, ENTRY)
    assert kept_files(ours) == []
    assert "link that another user made" in warnings_of(caplog)[0]


def test_our_own_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "scratch")
    cache = KernelCache(tmp_path / "cache")
    assert cache.store(KEY, ENTRY)
    assert cache.load(KEY) is not None


@pytest.mark.parametrize("name", ["kernel.cubin", "key.json", "checksum"])
@pytest.mark.parametrize("plant", ["link", "writable", "pipe", "owner"])
def test_a_planted_file_is_a_miss(cache: KernelCache, name: str, plant: str) -> None:
    cache.store(KEY, ENTRY)
    path = cache.path_of(KEY) / name
    if plant == "link":
        path.rename(cache.root / name)
        path.symlink_to(cache.root / name)
    elif plant == "writable":
        path.chmod(0o666)
    elif plant == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        pytest.skip("only root can give a file away")
    assert cache.load(KEY) is None


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path(os.devnull)
    with pytest.raises(OSError, match="not a regular file"):
        private_folder.read_trusted(path, limit=100)


def test_a_file_another_process_holds_is_a_miss(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses a reader while the entry is being replaced."""
    cache.store(KEY, ENTRY)
    real, failures = private_folder.read_trusted, [PermissionError(errno.EACCES, "sharing violation")]

    def read_trusted(path: Path, *, limit: int) -> bytes:
        if failures:
            raise failures.pop()
        return real(path, limit=limit)

    monkeypatch.setattr(private_folder, "read_trusted", read_trusted)
    assert cache.load(KEY) is None
    assert cache.load(KEY) is not None


def test_a_huge_file_is_not_read(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(KEY, ENTRY)
    monkeypatch.setitem(cache_module._LIMITS, "kernel.cubin", 100)
    assert cache.load(KEY) is None


# ---- Names ----


@pytest.mark.parametrize("name", ["with space", "schlüssel-鍵", "quote'\"$(x)", "a" * 255])
def test_any_folder_name_the_file_system_takes(tmp_path: Path, name: str) -> None:
    cache = KernelCache(tmp_path / name)
    assert cache.store(KEY, ENTRY)
    assert cache.load(KEY) is not None
    with cache.lock(KEY, seconds=1) as held:
        assert held


def test_a_name_the_file_system_refuses_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = KernelCache(tmp_path / ("n" * 300))
    assert cache.load(KEY) is None
    assert not cache.store(KEY, ENTRY)
    assert len(warnings_of(caplog)) == 1


def test_entry_names_are_short_and_plain() -> None:
    assert KEY.folder.isascii()
    assert len(kernel_key(family="forward_sm80").folder) < 64
