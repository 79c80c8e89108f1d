from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from flashsmith.runtime.tune.process import WorkerCrashed, WorkerFailed, WorkerProcess, WorkerTimeout


@pytest.fixture
def worker():
    with WorkerProcess("helpers_tune:echo_handler", {"prefix": "> "}) as process:
        yield process


def test_replies_and_keeps_one_child(worker):
    first = worker.request({"do": "one"}, timeout=30)
    second = worker.request({"do": "two"}, timeout=30)
    assert first["said"] == "> one"
    assert first["pid"] == second["pid"] != os.getpid()
    assert worker.starts == 1


def test_what_the_work_prints_is_no_reply(worker):
    assert worker.request({"do": "print"}, timeout=30)["said"] == "> print"


def test_an_exception_is_a_reply_and_the_child_lives_on(worker):
    pid = worker.request({"do": "one"}, timeout=30)["pid"]
    with pytest.raises(WorkerFailed, match="a bad candidate") as caught:
        worker.request({"do": "raise"}, timeout=30)
    assert caught.value.kind == "ValueError"
    assert worker.request({"do": "one"}, timeout=30)["pid"] == pid


def test_an_exit_gives_code_and_last_words_and_the_next_request_restarts(worker):
    with pytest.raises(WorkerCrashed, match=r"exit code 7.*last words"):
        worker.request({"do": "exit"}, timeout=30)
    assert worker.request({"do": "again"}, timeout=30)["said"] == "> again"
    assert worker.starts == 2


def test_a_crash_names_the_signal(worker):
    with pytest.raises(WorkerCrashed, match="SIGSEGV"):
        worker.request({"do": "crash"}, timeout=30)


def test_a_hang_is_killed_in_time(worker):
    pid = worker.request({"do": "one"}, timeout=30)["pid"]
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match="No reply within 1 s"):
        worker.request({"do": "hang"}, timeout=1)
    assert time.monotonic() - started < 10
    assert not _alive(pid)
    assert worker.request({"do": "again"}, timeout=30)["said"] == "> again"


def test_a_lost_context_ends_the_child(worker):
    pid = worker.request({"do": "one"}, timeout=30)["pid"]
    with pytest.raises(WorkerFailed) as caught:
        worker.request({"do": "lose"}, timeout=30)
    assert caught.value.kind == "ContextLost"
    assert worker.request({"do": "again"}, timeout=30)["pid"] != pid


def test_a_killed_child_wakes_its_thread_and_never_comes_back(worker):
    pid = worker.request({"do": "one"}, timeout=30)["pid"]
    threading.Timer(0.5, worker.kill).start()
    started = time.monotonic()
    with pytest.raises(WorkerCrashed, match="SIGKILL"):
        worker.request({"do": "hang"}, timeout=60)
    assert time.monotonic() - started < 10
    assert not _alive(pid)
    with pytest.raises(WorkerCrashed, match="ended before"):
        worker.request({"do": "one"}, timeout=30)


def test_a_setup_that_failed_is_tried_again():
    with WorkerProcess("helpers_tune:no_such_handler", {}) as process:
        for _ in range(2):
            with pytest.raises(WorkerFailed, match="no_such_handler"):
                process.request({"do": "one"}, timeout=30)


def test_the_child_ends_with_a_killed_parent():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from flashsmith.runtime.tune.process import WorkerProcess\n"
        "worker = WorkerProcess('helpers_tune:echo_handler', {'prefix': ''})\n"
        "print(worker.request({'do': 'one'}, timeout=30)['pid'], flush=True)\n"
        "worker.request({'do': 'hang'}, timeout=3600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
