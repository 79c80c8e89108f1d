"""The JSON record of a conformance case: what the GPU wrote, and how the engine compares with it."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any

from ...generator.errors import EmulatorError
from .conformance_kernels import Case
from .conformance_rules import TrapRule
from .conformance_worker import Outcome

Record = dict[str, Any]

#: How the driver says that a kernel trapped.
_TRAP = "CUDA_ERROR_ILLEGAL_INSTRUCTION"


def record_of(case: Case, outcome: Outcome) -> Record:
    """The record of what `case` did on the GPU, before the engine is asked: "passed" is None, or False if it failed.

    "status" is the outcome's, but "trap" for a crash by an illegal instruction, which some cases must end in.
    """
    status = "trap" if outcome.status == "crash" and _TRAP in outcome.message else outcome.status
    record: Record = {
        "name": case.name,
        "note": case.note,
        "rule": case.rule.text,
        "status": status,
        "words": 0,
        "passed": None if status == "not run" or is_comparable(case, status) else False,
        "mismatches": None,
        "worst": None,
        "unit": "",
        "example": "" if outcome.status == "ran" else f"{status}: {outcome.message}",
        "case_digest": case.digest,
        "gpu_digest": "",
        "gpu_output": None,
    }
    if outcome.status == "ran":
        record["words"] = int(outcome.words.size)
        record["gpu_digest"] = _digest(case.rule.canonical(outcome.words))
        record["gpu_output"] = _encode(outcome.words)
    return record


def is_comparable(case: Case, status: str) -> bool:
    """Whether the engine can be held against a record of this status: there is an output, or a trap as demanded."""
    return status == "ran" or (status == "trap" and isinstance(case.rule, TrapRule))


def compare(case: Case, record: Record, engine: Any) -> Record:
    """The record with what the engine gave (`run_on_engine`) held against the GPU's output or trap.

    Raises EmulatorError where the engine does not find the reason of a trap.
    """
    if record["status"] == "trap":
        assert isinstance(case.rule, TrapRule)
        if not any(case.rule.finding in message for message in engine):
            raise EmulatorError(f"it must find that {case.rule.finding}, but found {'; '.join(engine) or 'nothing'}")
        return {**record, "passed": True}
    found = case.rule.compare(decode(record["gpu_output"]), engine, case.arrays)
    agreed = found.mismatches == 0
    return {
        **record,
        "passed": agreed,
        "mismatches": found.mismatches,
        "worst": found.worst,
        "unit": found.unit,
        "example": found.example,
        "gpu_output": None if case.rule.exact and agreed else record["gpu_output"],  # its digest says it all
    }


def broken_engine(record: Record, error: Exception) -> Record:
    """The record of a case that the engine did not run as it must."""
    return {**record, "passed": False, "example": f"the engine failed: {error}"}


def replay(case: Case, recorded: Record, engine: Any) -> Record:
    """The record of `case` again, from what the GPU is recorded to have done; one that failed there stays as it is."""
    status = recorded.get("status", "ran")
    if not is_comparable(case, status):
        return recorded
    if status == "ran" and recorded["gpu_output"] is None:
        if recorded["gpu_digest"] == _digest(case.rule.canonical(engine)):
            return recorded
        return {**recorded, "passed": False, "mismatches": None, "example": "the engine's digest differs"}
    return compare(case, recorded, engine)


def require_same_case(case: Case, recorded: Record) -> None:
    """Raises EmulatorError where `recorded` is of another text or of other inputs than `case` has now."""
    if recorded["case_digest"] != case.digest:
        raise EmulatorError(
            f"The recorded output of {case.name!r} must come from the same kernel and inputs, but they have changed"
            " since. Run the conformance program on a GPU again."
        )


def line_of(record: Record) -> str:
    """One line about a record, for a terminal."""
    unknown = "-" if record.get("status") == "not run" else "recorded"
    verdict = {True: "pass", False: "FAIL", None: unknown}[record["passed"]]
    worst = "" if record["worst"] is None else f"  worst {record['worst']:.3g} {record['unit']}"
    return f"{verdict:8} {record['name']:44} {record['words']:6} words{worst}  {record['example']}"


def decode(text: str) -> Any:
    """The words of a record's "gpu_output"."""
    import numpy as np

    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint32)


def _digest(words: Any) -> str:
    return hashlib.sha256(words.tobytes()).hexdigest()


def _encode(words: Any) -> str:
    return base64.b64encode(zlib.compress(words.tobytes(), 6)).decode()
