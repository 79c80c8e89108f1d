"""Where in the user's source an error arose."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType

_OWN = os.path.dirname(os.path.abspath(__file__))


def source_site() -> str:
    """` [mask.py, line 12: return q_idx and kv_idx]` of the innermost frame outside this package; "" without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if os.path.dirname(os.path.abspath(name)) != _OWN and f"{os.sep}torch{os.sep}" not in name:
            return site_text(name, frame.f_lineno)
        frame = frame.f_back
    return ""


def site_text(filename: str, line: int) -> str:
    """` [mask.py, line 12: source of the line]`."""
    source = linecache.getline(filename, line).strip()
    return f" [{os.path.basename(filename)}, line {line}{': ' + source if source else ''}]"
