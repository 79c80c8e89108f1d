"""The child side of `process.WorkerProcess`: reads requests, writes replies, ends with its parent.

Standard output belongs to the replies: whatever the work itself prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class ContextLost(Exception):
    """Raised by a handler when this process can do no more work (a sticky CUDA error): it replies, then ends."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    handler: Handler | None = None
    for line in sys.stdin:
        message = json.loads(line)
        reply: dict[str, Any]
        try:
            if handler is None:
                handler = _load(message["handler"])(**message["arguments"])
                reply = {}
            else:
                reply = handler(message)
        except ContextLost as error:
            reply = {"error": "ContextLost", "message": str(error), "ends": True}
        except Exception as error:  # noqa: BLE001 - whatever a candidate does wrong is a reply, not the end of the worker
            reply = {"error": type(error).__name__, "message": f"{error}"[:4000]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply.get("ends"):
            break
    # Not sys.exit: a CUDA context in a bad state may hang in its clean-up.
    os._exit(0)


def _load(name: str) -> Callable[..., Handler]:
    module, _, function = name.partition(":")
    factory: Callable[..., Handler] = getattr(importlib.import_module(module), function)
    return factory


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
