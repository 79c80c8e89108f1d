"""Stable hashes of plain data: the same in every process, on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(data: Any) -> str:
    """`data` (dicts, lists, strings, numbers, booleans, None) as one line of JSON with sorted keys."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(data: Any) -> str:
    """Hex SHA-256 of `canonical_json(data)`."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()
