"""What an earlier record of the same GPU spares a run of the conformance program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...generator.errors import EmulatorError
from .conformance_kernels import Case
from .conformance_record import Record
from .conformance_rules import TrapRule

#: What makes two records' GPUs the same: the driver and NVRTC may be newer.
_SAME = ("name", "cc")


def passed_before(cases: Sequence[Case], earlier: dict[str, Any] | None) -> dict[str, Record]:
    """The records of `earlier`, by name, that passed with the kernel and the inputs that `cases` have now."""
    known = _by_digest(earlier)
    records = {case.name: known.get((case.name, case.digest)) for case in cases}
    return {name: record for name, record in records.items() if record and record["passed"] is True}


def in_order(cases: Sequence[Case], earlier: dict[str, Any] | None) -> list[Case]:
    """What has never run as it is now first, then what failed, and last what is expected to trap."""
    known = _by_digest(earlier)

    def place(case: Case) -> tuple[bool, bool]:
        status = known.get((case.name, case.digest), {"status": "not run"}).get("status", "ran")
        return isinstance(case.rule, TrapRule), status not in ("not run", "no cubin")

    return sorted(cases, key=place)


def runs_before(earlier: dict[str, Any]) -> list[dict[str, Any]]:
    """The GPU and the engine of each run that has records in `earlier`, oldest first."""
    return [*earlier.get("earlier_runs", []), {"gpu": earlier["gpu"], "engine": earlier["engine"]}]


def require_same_gpu(earlier: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises EmulatorError where `earlier` is of another model than the GPU `identity`: records of two do not mix."""
    then, now = ([gpu.get(key) for key in _SAME] for gpu in (earlier["gpu"], identity))
    if then != now:
        raise EmulatorError(
            f"The earlier record must be of the same GPU, but is of {then[0]} ({then[1]}) and this one is {now[0]}"
            f" ({now[1]}). Run without --new-against."
        )


def _by_digest(earlier: dict[str, Any] | None) -> dict[tuple[str, str], Record]:
    return {(record["name"], record["case_digest"]): record for record in earlier["cases"]} if earlier else {}
