"""The schema of a tuned-config file: what one record says, and the strict way from plain data to it and back.

A file belongs to one kernel family on one GPU model: `<arch>/<gpu>/<family>.yaml`. It holds winners only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..generator.errors import FlashsmithError, StoreError
from ..generator.spec import AttentionSpec, ProblemShape

SCHEMA_VERSION = 1
#: The directory name of records that were predicted for an architecture, not measured on one GPU model.
ANY_GPU = "any"
STATUSES = ("measured", "predicted")
Status = Literal["measured", "predicted"]
ConfigDict = Mapping[str, int | bool | str]

_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True, order=True)
class SpecClass:
    """What two specs must share so that one's winner serves the other. `mask` and `score` are digests, "" for none."""

    op: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str = ""
    score: str = ""
    gqa_ratio: int = 0

    @classmethod
    def of(cls, spec: AttentionSpec) -> SpecClass:
        return cls(
            op=spec.op,
            dtype=spec.dtype,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            mask="" if spec.mask is None else spec.mask.digest[:_DIGEST_CHARS],
            score="" if spec.score is None else spec.score.digest[:_DIGEST_CHARS],
            gqa_ratio=spec.gqa_ratio or 0,
        )

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """The GPU a record was measured on, or (`name` = "any") the GPU model it was predicted for. 0 where unknown."""

    name: str
    cc: tuple[int, int]
    sm_count: int = 0
    memory_bytes: int = 0
    l2_bytes: int = 0
    sm_clock_khz: int = 0
    memory_clock_khz: int = 0

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "cc": f"{self.cc[0]}.{self.cc[1]}"}


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made the number: versions of the driver, NVRTC and flashsmith, and the digest of templates and generator.

    `kernel` is the SHA-256 of the text of the record's kernel: where it is still what is generated, the number holds
    though templates or generator have changed. Digests are cut to 16 digits; "" is unknown.
    """

    generator: str
    flashsmith: str
    nvrtc: str = ""
    driver: str = ""
    kernel: str = ""

    def to_dict(self) -> dict[str, str]:
        values: dict[str, str] = {f.name: getattr(self, f.name) for f in fields(self)}
        if not self.kernel:
            del values["kernel"]
        return values


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of one call: median, spread (relative, between the quartiles), samples; TFLOP/s as in `tiles`."""

    median_ms: float
    spread: float = 0.0
    n: int = 0
    tflops: float = 0.0
    gbps: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        digits = {"median_ms": 6, "spread": 5, "tflops": 2, "gbps": 2}
        return {f.name: _round(getattr(self, f.name), digits.get(f.name)) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Record:
    """One winner: which problem, which config, how fast, against what, on what, and how it was proved.

    `status` is "measured" or "predicted" (cost model; `time` is then the model's estimate). `default_ms` is the default
    config's time in the same run, 0 where it could not run or was wrong. `baseline` is (name, ms) of
    the fastest torch back end in the same run, or None. `ties` are configs within the noise of the winner; `tie_rule`
    says why this one was taken. `compiled` counts the configs that a prediction chose among, 0 where unknown.
    `runner_up` is the next fastest right config and its ms in the same rounds, or None; `why` sets the winner's tiles,
    waves and prologue against the runner-up's in words, "" where nobody asked.
    """

    spec_class: SpecClass
    bucket: ProblemShape
    config: ConfigDict
    status: Status
    time: Timing
    default_ms: float
    device: DeviceIdentity
    provenance: Provenance
    verified: str = ""
    problem: str = ""
    values: Mapping[str, int | float] | None = None
    baseline: tuple[str, float] | None = None
    ties: tuple[ConfigDict, ...] = ()
    tie_rule: str = ""
    compiled: int = 0
    runner_up: tuple[ConfigDict, float] | None = None
    why: str = ""

    @property
    def key(self) -> tuple[SpecClass, ProblemShape]:
        return self.spec_class, self.bucket

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the order people read it; `record_from_dict` reads an equal record back."""
        data: dict[str, Any] = {
            "problem": self.problem,
            "class": self.spec_class.to_dict(),
            "bucket": self.bucket.to_dict(),
            "config": dict(self.config),
            "status": self.status,
            "verified": self.verified,
            "time": self.time.to_dict(),
            "default_ms": _round(self.default_ms, 6),
        }
        if self.values:
            data["values"] = dict(self.values)
        if self.baseline is not None:
            data["baseline"] = {"name": self.baseline[0], "median_ms": _round(self.baseline[1], 6)}
        if self.ties:
            data["ties"] = [dict(c) for c in self.ties]
        if self.tie_rule:
            data["tie_rule"] = self.tie_rule
        if self.compiled:
            data["compiled"] = self.compiled
        if self.runner_up is not None:
            data["runner_up"] = {"config": dict(self.runner_up[0]), "median_ms": _round(self.runner_up[1], 6)}
        if self.why:
            data["why"] = self.why
        data["device"] = self.device.to_dict()
        data["provenance"] = self.provenance.to_dict()
        return data


def record_from_dict(data: Any, *, where: str) -> Record:
    """The record that `Record.to_dict` wrote. Raises StoreError with `where` and the key at fault."""
    reader = _Reader(data, where)
    record = Record(
        problem=reader.text("problem", ""),
        spec_class=_spec_class(reader.child("class")),
        bucket=_bucket(reader.take("bucket"), where),
        config=_config(reader.take("config"), f"{where}: config"),
        status=reader.choice("status", STATUSES),  # type: ignore[arg-type]
        verified=reader.text("verified", ""),
        time=_timing(reader.child("time")),
        default_ms=reader.number("default_ms"),
        values=_values(reader.take("values", None), f"{where}: values"),
        baseline=_baseline(reader, where),
        ties=_ties(reader.take("ties", []), f"{where}: ties"),
        tie_rule=reader.text("tie_rule", ""),
        compiled=reader.integer("compiled", default=0),
        runner_up=_runner_up(reader, where),
        why=reader.text("why", ""),
        device=_device(reader.child("device")),
        provenance=_provenance(reader.child("provenance")),
    )
    reader.finish()
    return record


class _Reader:
    """Takes the values of one map by name and type, and complains about what is missing, ill-typed or left over."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise StoreError(f"{where} must be a map, but got {_short(data)}.")
        self._data = dict(data)
        self._where = where

    def take(self, name: str, default: Any = ...) -> Any:
        if name in self._data:
            return self._data.pop(name)
        if default is ...:
            raise StoreError(f"{self._where} lacks the key {name!r}.")
        return default

    def child(self, name: str) -> _Reader:
        return _Reader(self.take(name), f"{self._where}: {name}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self.take(name, ... if default is None else default)
        if not isinstance(value, str) or len(value) > 2000:
            raise StoreError(f"{self._where}: {name} must be a string of at most 2000 characters, got {_short(value)}.")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in allowed:
            raise StoreError(f"{self._where}: {name} must be one of {', '.join(allowed)}, but got {_short(value)}.")
        return value

    def integer(self, name: str, *, minimum: int = 0, default: int | None = None) -> int:
        value = self.take(name, ... if default is None else default)
        if type(value) is not int or value < minimum:
            raise StoreError(f"{self._where}: {name} must be an integer >= {minimum}, but got {_short(value)}.")
        return value

    def number(self, name: str, *, positive: bool = False) -> float:
        value = self.take(name)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0 or (positive and value == 0):
            bound = "> 0" if positive else ">= 0"
            raise StoreError(f"{self._where}: {name} must be a number {bound}, but got {_short(value)}.")
        return float(value)

    def finish(self) -> None:
        if self._data:
            unknown = ", ".join(sorted(map(str, self._data)))
            raise StoreError(f"{self._where} has unknown keys: {unknown}. Remove them, or update flashsmith.")


def _spec_class(reader: _Reader) -> SpecClass:
    result = SpecClass(
        op=reader.text("op"),
        dtype=reader.text("dtype"),
        head_dim=reader.integer("head_dim", minimum=1),
        head_dim_v=reader.integer("head_dim_v", minimum=1),
        mask=reader.text("mask"),
        score=reader.text("score"),
        gqa_ratio=reader.integer("gqa_ratio"),
    )
    reader.finish()
    return result


def _bucket(data: Any, where: str) -> ProblemShape:
    if not isinstance(data, Mapping):
        raise StoreError(f"{where}: bucket must be a map, but got {_short(data)}.")
    try:
        return ProblemShape.from_dict(data)
    except FlashsmithError as error:
        raise StoreError(f"{where}: bucket: {error}") from None


def _config(data: Any, where: str) -> dict[str, int | bool | str]:
    if not isinstance(data, Mapping) or not data:
        raise StoreError(f"{where} must be a map of choices, but got {_short(data)}.")
    for name, value in data.items():
        if type(value) not in (int, bool, str):
            raise StoreError(f"{where}: {name} must be an integer, boolean or string, but got {_short(value)}.")
    return dict(data)


def _ties(data: Any, where: str) -> tuple[ConfigDict, ...]:
    if not isinstance(data, list):
        raise StoreError(f"{where} must be a list, but got {_short(data)}.")
    return tuple(_config(item, where) for item in data)


def _values(data: Any, where: str) -> dict[str, int | float] | None:
    if data is None:
        return None
    if not isinstance(data, Mapping) or any(type(value) not in (int, float) for value in data.values()):
        raise StoreError(f"{where} must be a map of numbers, but got {_short(data)}.")
    return dict(data)


def _baseline(reader: _Reader, where: str) -> tuple[str, float] | None:
    data = reader.take("baseline", None)
    if data is None:
        return None
    child = _Reader(data, f"{where}: baseline")
    result = child.text("name"), child.number("median_ms", positive=True)
    child.finish()
    return result


def _runner_up(reader: _Reader, where: str) -> tuple[ConfigDict, float] | None:
    data = reader.take("runner_up", None)
    if data is None:
        return None
    child = _Reader(data, f"{where}: runner_up")
    result = _config(child.take("config"), f"{where}: runner_up"), child.number("median_ms", positive=True)
    child.finish()
    return result


def _timing(reader: _Reader) -> Timing:
    result = Timing(
        median_ms=reader.number("median_ms", positive=True),
        spread=reader.number("spread"),
        n=reader.integer("n"),
        tflops=reader.number("tflops"),
        gbps=reader.number("gbps"),
    )
    reader.finish()
    return result


def _device(reader: _Reader) -> DeviceIdentity:
    cc = reader.text("cc").split(".")
    if len(cc) != 2 or not all(part.isascii() and part.isdecimal() and len(part) < 4 for part in cc):
        raise StoreError(f"device: cc must be two numbers such as 9.0, but got {_short('.'.join(cc))}.")
    result = DeviceIdentity(
        name=reader.text("name"),
        cc=(int(cc[0]), int(cc[1])),
        sm_count=reader.integer("sm_count"),
        memory_bytes=reader.integer("memory_bytes"),
        l2_bytes=reader.integer("l2_bytes"),
        sm_clock_khz=reader.integer("sm_clock_khz"),
        memory_clock_khz=reader.integer("memory_clock_khz"),
    )
    reader.finish()
    return result


def _provenance(reader: _Reader) -> Provenance:
    result = Provenance(
        generator=reader.text("generator"),
        flashsmith=reader.text("flashsmith"),
        nvrtc=reader.text("nvrtc", ""),
        driver=reader.text("driver", ""),
        kernel=reader.text("kernel", ""),
    )
    reader.finish()
    return result


def _round(value: float, digits: int | None) -> float:
    return value if digits is None else round(value, digits)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
