"""The trial log: append-only JSON lines that a search can be resumed from and replayed from.

A line has a `kind`: "session" (what is tuned, on what, with which versions), "fresh" (earlier trials do not count),
"trial" (one config's result at one shape), "winner" (the bucket is done). Rows of an exhaustive run are trials like any
others. A half last line, left by a crash, is skipped when read and closed before more is written.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal, TypeGuard

from ...generator.errors import TuneError
from ...generator.spec import ProblemShape

logger = logging.getLogger("flashsmith.tune")

_DAMAGED: Literal["damaged"] = "damaged"

#: What became of a candidate. Only "ok" has a time.
OUTCOMES = ("ok", "constraint", "compile", "spill", "launch", "wrong", "crash", "timeout")
ConfigDict = Mapping[str, int | bool | str]
#: A config as something hashable: its choices, sorted.
ConfigKey = tuple[tuple[str, int | bool | str], ...]


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
    def key(self) -> ConfigKey:
        """The config as something hashable."""
        return config_key(self.config)

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        data["class"] = data.pop("outcome")
        return {"kind": "trial", **data, "config": dict(self.config), "shape": self.shape.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The trial `to_dict` wrote; unknown keys are ignored. Raises ValueError on bad data."""
        values = {name: data[name] for name in _CHECKS if name in data}
        wrong = [name for name, value in values.items() if not _CHECKS[name](value)]
        config, shape, outcome = (data.get(name) for name in ("config", "shape", "class"))
        if wrong or not _is_config(config) or not isinstance(shape, Mapping) or outcome not in OUTCOMES:
            raise ValueError(f"not a trial: {', '.join(wrong) or 'its config, shape or class'}")
        if (values.get("ms_median") is not None) != (outcome == "ok"):
            raise ValueError("a trial has a time if it is ok, and only then")
        return cls(config=dict(config), shape=ProblemShape.from_dict(shape), outcome=outcome, **values)


def config_key(config: ConfigDict) -> ConfigKey:
    """A config as something hashable."""
    return tuple(sorted(config.items()))


def _is_config(value: Any) -> TypeGuard[ConfigDict]:
    return (
        isinstance(value, dict) and bool(value) and all(type(choice) in (int, bool, str) for choice in value.values())
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0 and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


#: What each value of a trial must be, beside its config, shape and class.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "ms_median": lambda value: value is None or (_is_number(value) and value > 0),
    "ms_spread": _is_number,
    "n": _is_count,
    "raced": lambda value: isinstance(value, bool),
    "registers": _is_count,
    "spill_bytes": _is_count,
    "smem_bytes": _is_count,
    "compile_s": _is_number,
    "message": _is_text,
    "spec": _is_text,
}


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

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Appends `rows`. A full disk is said once; the search goes on without its log."""
        try:
            for row in rows:
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
            except (ValueError, RecursionError):  # nested a thousand deep
                damaged += bool(line.strip())
                continue
            yield row
    _say_damaged(damaged, path)


def read_trials(path: Path) -> list[Trial]:
    """Every trial in the log, whatever session it belongs to; damaged ones are skipped and counted in one warning."""
    found = [_trial_of(row) for row in read_rows(path)]
    _say_damaged(found.count(_DAMAGED), path)
    return [trial for trial in found if isinstance(trial, Trial)]


def unfinished_trials(
    path: Path, session: Mapping[str, Any], shape: ProblemShape, *, space: Container[ConfigKey] | None = None
) -> list[Trial]:
    """The trials of `shape` made under an equal `session` and not yet closed by a winner: what a resumed run keeps.

    Damaged ones, and those of a config outside `space`, are skipped and counted in one warning.
    """
    trials: list[Trial] = []
    same = False
    damaged = 0
    for row in read_rows(path):
        if row.get("kind") == "session":
            same = {name: value for name, value in row.items() if name != "kind"} == json.loads(json.dumps(session))
        elif same and (row.get("kind") == "fresh" or _closes(row, shape)):
            trials.clear()
        elif same and (trial := _trial_of(row)) is not None:
            if isinstance(trial, Trial) and (space is None or trial.key in space):
                trials += [trial] if trial.shape == shape else []
            else:
                damaged += 1
    _say_damaged(damaged, path)
    return trials


def _say_damaged(count: int, path: Path) -> None:
    if count:
        logger.warning("Skipped %d damaged line(s) of %s.", count, path)


def _closes(row: Mapping[str, Any], shape: ProblemShape) -> bool:
    return row.get("kind") == "winner" and row.get("shape") == shape.to_dict()


def _trial_of(row: Mapping[str, Any]) -> Trial | Literal["damaged"] | None:
    """The trial of a row, None for a row of another kind."""
    if row.get("kind", "trial") != "trial":
        return None
    try:
        return Trial.from_dict(row)
    except (ValueError, OverflowError):
        return _DAMAGED


def _ends_midline(path: Path) -> bool:
    with open(path, "rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"
