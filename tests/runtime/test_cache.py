"""The disk cache: whole entries only, every defect a miss."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers_compile import ENTRY, kept_files, kernel_key, warnings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsmith.runtime import cache as cache_module
from flashsmith.runtime.cache import FOLDER, Entry, KernelCache, excess

KEY = kernel_key()

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are POSIX's")


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_warned", set())


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


def test_a_stored_entry_comes_back(cache: KernelCache) -> None:
    assert cache.load(KEY) is None
    assert cache.store(KEY, ENTRY)
    found = KernelCache(cache.root).load(KEY)
    assert found is not None
    assert (found.cubin, found.facts) == (ENTRY.cubin, ENTRY.facts)
    assert cache.read_source(KEY) == ENTRY.source
    folder = f"{FOLDER}/{KEY.folder}"
    assert kept_files(cache.root) == [FOLDER, folder] + [
        f"{folder}/{name}" for name in ("checksum", "kernel.cu", "kernel.cubin", "key.json")
    ]


def test_nothing_is_made_before_the_first_store(cache: KernelCache) -> None:
    assert cache.load(KEY) is None
    assert cache.entries() == []
    assert not cache.root.exists()


def test_files_and_folders_are_this_users_alone(cache: KernelCache) -> None:
    old = os.umask(0)
    try:
        cache.store(KEY, ENTRY)
    finally:
        os.umask(old)
    for path in (cache.root, *cache.root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_checksum_is_the_format_of_sha256sum(cache: KernelCache) -> None:
    cache.store(KEY, ENTRY)
    folder = cache.path_of(KEY)
    subprocess.run(["sha256sum", "--quiet", "-c", "checksum"], cwd=folder, check=True)


def test_key_json_reads_field_by_field(cache: KernelCache) -> None:
    cache.store(KEY, ENTRY)
    record = json.loads((cache.path_of(KEY) / "key.json").read_text())
    assert record["key"]["config"] == {"B_r": 128, "q_in_registers": True, "schedule": "linear"}
    assert record["key"]["compiler"] == "NVRTC build abc"
    assert record["facts"]["nvrtc"] == "13.0"


@pytest.mark.parametrize(
    "change",
    [
        {"spec": "6" * 64},
        {"config": (("B_r", 64), ("q_in_registers", True), ("schedule", "linear"))},
        {"config": (("B_r", 128), ("q_in_registers", 1), ("schedule", "linear"))},
        {"target": "sm_90a"},
        {"generator": "8" * 64},
        {"compiler": "NVRTC build abd"},
        {"options": ("--std=c++17", "-G")},
        {"flashsmith": "0.1.1"},
        {"family": "other"},
        {"schema": 2},
    ],
)
def test_any_other_field_is_another_entry(cache: KernelCache, change: dict[str, Any]) -> None:
    cache.store(KEY, ENTRY)
    assert kernel_key(**change).digest != KEY.digest
    assert cache.load(kernel_key(**change)) is None


def test_every_field_of_the_key_is_in_the_digest() -> None:
    assert set(KEY.to_dict()) == {f.name for f in cache_module.KernelKey.__dataclass_fields__.values()}


def test_an_entry_under_another_keys_name_is_a_miss(cache: KernelCache) -> None:
    cache.store(KEY, ENTRY)
    other = kernel_key(spec="6" * 64)
    cache.path_of(KEY).rename(cache.path_of(other))
    assert cache.load(other) is None


@pytest.mark.parametrize("name", ["kernel.cubin", "key.json", "checksum"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "longer", "garbage"])
def test_a_damaged_file_is_a_miss_and_is_replaced(cache: KernelCache, name: str, damage: str) -> None:
    cache.store(KEY, ENTRY)
    path = cache.path_of(KEY) / name
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"empty": b"", "half": data[: len(data) // 2], "longer": data + b"\n", "garbage": b"\xff"}[damage]
        )
    assert KernelCache(cache.root).load(KEY) is None
    assert cache.store(KEY, ENTRY)
    assert cache.load(KEY) is not None
    assert not [p for p in kept_files(cache.root) if ".tmp-" in p]


@settings(max_examples=60)
@given(
    file=st.sampled_from(["kernel.cubin", "key.json", "checksum"]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_no_flipped_bit_is_given_out(
    tmp_path_factory: pytest.TempPathFactory, file: str, where: float, bit: int
) -> None:
    cache = KernelCache(tmp_path_factory.mktemp("flip") / "cache")
    cache.store(KEY, ENTRY)
    path = cache.path_of(KEY) / file
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    path.write_bytes(data)
    found = cache.load(KEY)
    assert found is None or (found.cubin, found.facts) == (ENTRY.cubin, ENTRY.facts)
    if file == "kernel.cubin":
        assert found is None


def test_a_record_of_another_form_is_a_miss(cache: KernelCache) -> None:
    """Valid checksums over hostile JSON: a list, another key set, nesting without end."""
    for text in ("[]", '{"key": {}}', '{"key": {}, "facts": 3}', "[" * 200_000):
        cache.store(KEY, ENTRY)
        folder = cache.path_of(KEY)
        (folder / "key.json").write_text(text)
        sums = subprocess.run(
            ["sha256sum", "kernel.cu", "kernel.cubin", "key.json"],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
        (folder / "checksum").write_text(sums.stdout)
        assert cache.load(KEY) is None
        cache.clear()


def test_a_flipped_source_is_not_shown(cache: KernelCache) -> None:
    cache.store(KEY, ENTRY)
    (cache.path_of(KEY) / "kernel.cu").write_text("// another text\n")
    assert cache.read_source(KEY) is None
    assert cache.load(KEY) is not None  # the cubin is right
    assert "kernel.cu" in cache.entries()[0].problem


def test_a_process_killed_while_writing_leaves_a_miss(cache: KernelCache) -> None:
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from helpers_compile import kernel_key
        from flashsmith.runtime import private_folder
        from flashsmith.runtime.cache import Entry, KernelCache

        root, step = Path(sys.argv[1]), int(sys.argv[2])
        real, calls = private_folder.write_new, 0

        def write_new(path, data):
            global calls
            calls += 1
            real(path, data[: len(data) // 2] if calls == step else data)
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)

        private_folder.write_new = write_new
        if step == 5:
            os.rename = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
        KernelCache(root).store(kernel_key(), Entry(source="s", cubin=b"c" * 4096, facts={}))
        """
    )
    tests = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    for step in range(1, 6):
        done = subprocess.run([sys.executable, "-c", program, str(cache.root), str(step)], env=env, check=False)
        assert done.returncode == -signal.SIGKILL
        assert cache.load(KEY) is None
    left = [p for p in cache.folder.iterdir() if p.name.startswith(".tmp-")]
    assert len(left) == 5
    assert cache.entries() == []
    for path in left[:4]:
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert cache.store(KEY, ENTRY)
    assert [p for p in cache.folder.iterdir() if p.name.startswith(".tmp-")] == left[4:]  # it may be alive
    assert cache.load(KEY) is not None
    assert cache.clear() == 1
    assert kept_files(cache.root) == [FOLDER]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EBUSY, errno.EACCES, errno.ENOTEMPTY, errno.ESTALE])
def test_a_rename_that_fails_once_is_tried_again(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    real, failures = os.rename, [OSError(code, os.strerror(code))]

    def rename(source: Any, target: Any) -> None:
        if failures:
            raise failures.pop()
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert cache.store(KEY, ENTRY)
    assert cache.load(KEY) is not None
    assert not [p for p in kept_files(cache.root) if ".tmp-" in p]
    assert warnings_of(caplog) == []


def test_a_rename_that_always_fails_warns_once_and_leaves_nothing(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rename(source: Any, target: Any) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(cache_module, "_RETRIES", (0.0, 0.0))
    assert not cache.store(KEY, ENTRY)
    assert not cache.store(KEY, ENTRY)
    assert kept_files(cache.root) == [FOLDER]
    assert len(warnings_of(caplog)) == 1


def test_the_first_of_two_writers_stays(cache: KernelCache) -> None:
    cache.store(KEY, ENTRY)
    assert cache.store(KEY, Entry(source="other", cubin=b"other", facts={}))
    found = cache.load(KEY)
    assert found is not None
    assert found.cubin == ENTRY.cubin
    assert not [p for p in kept_files(cache.root) if ".tmp-" in p]


def test_a_reader_meets_whole_entries_while_another_replaces_them(cache: KernelCache) -> None:
    """A corrupt entry is replaced again and again: each read is a miss or the right bytes."""
    cache.store(KEY, ENTRY)
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            found = cache.load(KEY)
            if found is not None and (found.cubin, found.facts) != (ENTRY.cubin, ENTRY.facts):
                wrong.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(100):
        (cache.path_of(KEY) / "kernel.cubin").write_bytes(b"broken")
        assert cache.store(KEY, ENTRY)
    stop.set()
    reader.join()
    assert wrong == []


# ---- Locks, listing, pruning ----


def test_the_lock_waits_a_bounded_time(cache: KernelCache) -> None:
    with cache.lock(KEY, seconds=5) as held:
        assert held
        start = time.perf_counter()
        with KernelCache(cache.root).lock(KEY, seconds=0.2) as second:
            assert not second
        assert 0.15 < time.perf_counter() - start < 3
        with cache.lock(kernel_key(spec="6" * 64), seconds=5) as other:
            assert other
    with cache.lock(KEY, seconds=5) as held:
        assert held


def test_the_body_of_a_lock_may_raise(cache: KernelCache) -> None:
    with pytest.raises(OSError, match="inside"), cache.lock(KEY, seconds=1):
        raise OSError("inside")
    with cache.lock(KEY, seconds=0.2) as held:
        assert held


def test_entries_and_prune(cache: KernelCache) -> None:
    keys = [kernel_key(spec=str(i) * 64) for i in range(4)]
    for age, key in enumerate(keys):
        cache.store(key, ENTRY)
        os.utime(cache.path_of(key), (1000 - age, 1000 - age))
    (cache.path_of(keys[0]) / "kernel.cubin").write_bytes(b"")
    entries = cache.entries()
    assert [e.path.name for e in entries] == [k.folder for k in keys]
    assert [bool(e.problem) for e in entries] == [True, False, False, False]
    assert entries[1].key["target"] == "sm_90"
    assert entries[1].facts["nvrtc"] == "13.0"
    too_many = excess(reversed(entries), 2 * entries[1].nbytes)
    assert [e.path for e in too_many] == [entries[0].path, entries[3].path]  # the broken one and the oldest
    assert all(cache.remove(e.path) for e in too_many)
    assert [e.path.name for e in cache.entries()] == [k.folder for k in keys[1:3]]
    with cache.lock(KEY, seconds=1):
        pass
    assert cache.clear() == 2
    assert cache.entries() == []
    assert list(cache.folder.iterdir()) == []
