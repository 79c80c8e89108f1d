"""What a campaign left in its log: the buckets that have a winner, so that the same command goes on from there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...generator.errors import StoreError
from ...generator.spec import ProblemShape
from ..store_schema import Record, record_from_dict
from .log import read_rows
from .request import TuneRequest


def finished_records(path: Path, sessions: Iterable[Mapping[str, Any]]) -> dict[str, dict[ProblemShape, Record]]:
    """By spec digest, the winners found under equal sessions since the last campaign that came to its end."""
    wanted = {str(session["spec"]): json.loads(json.dumps(session)) for session in sessions}
    found: dict[str, dict[ProblemShape, Record]] = {digest: {} for digest in wanted}
    current = ""
    for row in read_rows(path):
        kind = row.get("kind")
        if kind == "session":
            digest = str(row.get("spec"))
            same = {name: value for name, value in row.items() if name != "kind"} == wanted.get(digest)
            current = digest if same else ""
        elif kind == "end":
            for records in found.values():
                records.clear()
        elif current and kind == "fresh":
            found[current].clear()
        elif current and kind == "winner" and "record" in row:
            try:
                record = record_from_dict(row["record"], where="a winner in the log")
            except StoreError:
                continue
            found[current][record.bucket] = record
    return found


def campaign_id(requests: Sequence[TuneRequest]) -> str:
    """A name for what is to be tuned: equal for the same problems, sizes and family, whatever the budget."""
    text = [
        [request.problem.to_dict(), [shape.to_dict() for shape in request.shapes], request.family or ""]
        for request in requests
    ]
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12]
