"""The trial log: append-only JSON lines that a search can be resumed from and replayed from.

A line has a `kind`: "session" (what is tuned, on what, with which versions), "fresh" (earlier trials do not count),
"trial" (one config's result at one shape), "winner" (the bucket is done). Rows of an exhaustive run are trials like any
others. A half last line, left by a crash, is skipped when read and closed before more is written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from ...generator.errors import TuneError
from ...generator.spec import ProblemShape

logger = logging.getLogger("flashsmith.tune")

#: What became of a candidate. Only "ok" has a time.
OUTCOMES = ("ok", "constraint", "compile", "spill", "launch", "wrong", "crash", "timeout")
ConfigDict = Mapping[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate at one shape. `ms_spread` is relative; `raced` says that it was dropped after a few samples.

    `spec` is the problem in words, so that a line can be read on its own.
    """

    config: ConfigDict
    shape: ProblemShape
    outcome: str
    ms_median: float | None = None
    ms_spread: float = 0.0
    n: int = 0
    raced: bool = False
    registers: int = 0
    spill_bytes: int = 0
    smem_bytes: int = 0
    compile_s: float = 0.0
    message: str = ""
    spec: str = ""

    @property
    def key(self) -> tuple[tuple[str, int | bool | str], ...]:
        """The config as something hashable."""
        return tuple(sorted(self.config.items()))

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["class"] = data.pop("outcome")
        return {"kind": "trial", **data, "config": dict(self.config), "shape": self.shape.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The trial `to_dict` wrote; unknown keys are ignored. Raises KeyError, TypeError or SpecError on bad data."""
        known = {f.name for f in fields(cls)} - {"config", "shape", "outcome"}
        values = {name: value for name, value in data.items() if name in known}
        if data["class"] not in OUTCOMES:
            raise KeyError(data["class"])
        shape = ProblemShape.from_dict(data["shape"])
        return cls(config=dict(data["config"]), shape=shape, outcome=data["class"], **values)


class TrialLog:
    """Appends to one file; only one process at a time may hold it. Each line is on disk before `write` returns.

    Raises TuneError where another process holds the file, and OSError where it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        from filelock import FileLock, Timeout

        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(f"{path}.lock", timeout=0)
            self._lock.acquire()
            self._stream: IO[bytes] = open(path, "ab")  # noqa: SIM115 - held until close()
        except Timeout:
            raise TuneError(
                f"Another tuning run writes to {path}. Wait for it to end, or name another file with --log."
            ) from None
        if _ends_midline(path):
            self._stream.write(b"\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends `row`. A full disk is said once; the search goes on without its log."""
        try:
            self._stream.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            logger.warning(
                "The trial log %s could not be written (%s); this run cannot be resumed.", self.path, error.strerror
            )

    def close(self) -> None:
        self._stream.close()
        self._lock.release()

    def __enter__(self) -> TrialLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole row of the log; damaged lines are skipped and counted in one warning. No file: no rows."""
    damaged = 0
    try:
        stream = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return
    except OSError as error:
        raise TuneError(f"The trial log {path} cannot be read: {error.strerror}.") from None
    with stream:
        for line in stream:
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(line)
            except ValueError:
                damaged += bool(line.strip())
                continue
            yield row
    if damaged:
        logger.warning("Skipped %d damaged line(s) of %s.", damaged, path)


def read_trials(path: Path) -> list[Trial]:
    """Every trial in the log, whatever session it belongs to."""
    return [trial for row in read_rows(path) if (trial := _trial_of(row)) is not None]


def unfinished_trials(path: Path, session: Mapping[str, Any], shape: ProblemShape) -> list[Trial]:
    """The trials of `shape` made under an equal `session` and not yet closed by a winner: what a resumed run keeps."""
    trials: list[Trial] = []
    same = False
    for row in read_rows(path):
        if row.get("kind") == "session":
            same = {name: value for name, value in row.items() if name != "kind"} == json.loads(json.dumps(session))
        elif same and (row.get("kind") == "fresh" or _closes(row, shape)):
            trials.clear()
        elif same and (trial := _trial_of(row)) is not None and trial.shape == shape:
            trials.append(trial)
    return trials


def _closes(row: Mapping[str, Any], shape: ProblemShape) -> bool:
    return row.get("kind") == "winner" and row.get("shape") == shape.to_dict()


def _trial_of(row: Mapping[str, Any]) -> Trial | None:
    if row.get("kind", "trial") != "trial":
        return None
    try:
        return Trial.from_dict(row)
    except (KeyError, TypeError, ValueError):
        return None


def _ends_midline(path: Path) -> bool:
    with open(path, "rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"
