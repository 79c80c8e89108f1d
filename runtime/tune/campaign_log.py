"""What a campaign left in its log: the buckets that have a winner, so that the same command goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...generator.errors import StoreError
from ...generator.spec import ProblemShape
from ..store_schema import Record, record_from_dict
from .log import Trial, read_rows
from .request import TuneRequest


@dataclass(slots=True)
class Left:
    """What a campaign that did not come to its end left of one spec: its winners, and trials of the other buckets."""

    records: dict[ProblemShape, Record] = field(default_factory=dict)
    trials: dict[ProblemShape, list[Trial]] = field(default_factory=dict)

    def clear(self) -> None:
        self.records.clear()
        self.trials.clear()


def left_by(path: Path, sessions: Iterable[Mapping[str, Any]]) -> dict[str, Left]:
    """By spec digest, what was found under equal sessions since the last campaign that came to its end; one reading."""
    wanted = {str(session["spec"]): json.loads(json.dumps(session)) for session in sessions}
    found = {digest: Left() for digest in wanted}
    current: Left | None = None
    for row in read_rows(path):
        kind = row.get("kind")
        if kind == "session":
            digest = str(row.get("spec"))
            same = {name: value for name, value in row.items() if name != "kind"} == wanted.get(digest)
            current = found[digest] if same else None
        elif kind == "end":
            for left in found.values():
                left.clear()
        elif current is not None and kind == "fresh":
            current.clear()
        elif current is not None:
            _take(current, row)
    return found


def _take(left: Left, row: Mapping[str, Any]) -> None:
    """Adds what a row of a campaign says; a damaged one is passed over."""
    try:
        if row.get("kind") == "winner" and "record" in row:
            record = record_from_dict(row["record"], where="a winner in the log")
            left.records[record.bucket] = record
            left.trials.pop(record.bucket, None)
        elif row.get("kind", "trial") == "trial":
            trial = Trial.from_dict(row)
            left.trials.setdefault(trial.shape, []).append(trial)
    except (StoreError, ValueError, OverflowError):
        return


def campaign_id(requests: Sequence[TuneRequest]) -> str:
    """A name for what is to be tuned: equal for the same problems, sizes and family, whatever the budget."""
    text = [
        [request.problem.to_dict(), [shape.to_dict() for shape in request.shapes], request.family or ""]
        for request in requests
    ]
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12]
