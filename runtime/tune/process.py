"""A child process that answers one request at a time, and may hang, crash or be killed without harm to the caller.

Requests and replies are lines of JSON over the child's standard input and output. What runs in the child is a function
`module:name`, called once with keyword arguments; it returns the function that turns each request into a reply.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any

from ...generator.errors import TuneError

START_SECONDS = 120.0
_STDERR_TAIL = 2000
#: The child imports from where this process does, and nothing of this process's main module.
_CHILD = "import sys; sys.path[:] = {path!r}; from flashsmith.runtime.tune.worker import main; main()"


class WorkerCrashed(TuneError):
    """The child ended while it worked on a request. The message holds its last words."""


class WorkerTimeout(TuneError):
    """The child gave no reply in time and was killed."""


class WorkerFailed(TuneError):
    """The request raised in the child; `kind` is the exception's class name. The child lives on."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerProcess:
    """One child; started at the first request, and again after it died. For one thread, but for `kill`."""

    def __init__(self, handler: str, arguments: Mapping[str, Any]) -> None:
        self._setup = {"handler": handler, "arguments": dict(arguments)}
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._stderr: IO[bytes] | None = None
        self._killed = False
        self._starting = threading.Lock()
        #: How often a child was started.
        self.starts = 0

    def request(self, message: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """The child's reply. Raises WorkerCrashed, WorkerTimeout or WorkerFailed; the next call starts a new child."""
        if self._process is None:
            self._start()
            try:
                self._exchange(self._setup, START_SECONDS)
            except WorkerFailed:
                self.close()  # it has no handler: the next request sets a new child up
                raise
        return self._exchange(message, timeout)

    def close(self) -> None:
        """Ends the child and everything it started. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            _kill_tree(process)
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def kill(self) -> None:
        """Ends the child for good. Any thread may call it: a request that is under way, or comes later, crashes."""
        with self._starting:
            self._killed = True
            process = self._process
        if process is not None and process.poll() is None:
            _signal_tree(process)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        self.close()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - held until close()
        with self._starting:
            if self._killed:
                raise WorkerCrashed("The worker process was ended before this request.")
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        self.starts += 1
        self._replies = queue.Queue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._replies), daemon=True).start()

    def _exchange(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise WorkerTimeout(f"No reply within {timeout:.0f} s; the worker process was ended.") from None
        except OSError:
            line = None
        if line is None:
            raise WorkerCrashed(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if reply.pop("ends", False):
            # The child's CUDA context cannot be trusted any more: the next request gets a new child.
            self.close()
        if "error" in reply:
            raise WorkerFailed(str(reply["message"]), kind=str(reply["error"]))
        return reply

    def _last_words(self) -> str:
        process = self._process
        code = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=5)
        text = ""
        if self._stderr is not None:
            size = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size - _STDERR_TAIL))
            text = self._stderr.read().decode(errors="replace").strip()
        self.close()
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"The worker process ended with {how}." + (f" Its last words: {text}" if text else "")


def _pump(stream: IO[str] | None, replies: queue.Queue[str | None]) -> None:
    assert stream is not None
    with contextlib.suppress(ValueError, OSError), stream:
        for line in stream:
            replies.put(line)
    replies.put(None)  # the end of the child's replies


def _kill_tree(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    _signal_tree(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def _signal_tree(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
