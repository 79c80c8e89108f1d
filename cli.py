"""The `flashsmith` command: a thin shell over `runtime/commands`, one module a command, loaded when it is asked for.

Standard output carries results only (with `--json`, one JSON document); messages and logs go to standard error. The
exit code is 2 for usage errors, 1 for every other failure, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from flashsmith.generator.errors import FlashsmithError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line `arguments` (default: the process's own) and exits."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """The exit code of the command line `arguments`; prints what the command prints."""
    import typer

    from flashsmith.runtime.commands.application import application

    # The root of typer's own errors, wherever it comes from: click, or typer's copy of it.
    typer_error: Any = typer.BadParameter.__mro__[2]
    as_json = "--json" in arguments
    try:
        configure_logging()
        code = application().main(args=list(arguments), prog_name="flashsmith", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except FlashsmithError as error:
        print(f"Error: {error}", file=sys.stderr)
        return _document(error, str(error), error.exit_code, as_json=as_json)
    except typer_error as error:
        error.show()
        return _document(error, error.format_message(), error.exit_code, as_json=as_json)
    except typer.Abort:
        print("Aborted.", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has gone: what Python would still flush at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


class _StandardError(logging.StreamHandler[TextIO]):
    """The command line's own handler, so that a second `run` in one process replaces it."""


def configure_logging() -> None:
    """Sends flashsmith's log to standard error, at the level that FLASHSMITH_LOG_LEVEL names."""
    from flashsmith.runtime import variables

    logger = logging.getLogger("flashsmith")
    logger.setLevel(variables.log_level())
    for handler in [h for h in logger.handlers if isinstance(h, _StandardError)]:
        logger.removeHandler(handler)
    handler = _StandardError()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)


def _document(error: Exception, message: str, code: int, *, as_json: bool) -> int:
    """`code`, after the error was printed as a JSON document where one is due."""
    if as_json:
        print(json.dumps({"error": {"type": type(error).__name__, "message": message}}, indent=2))
    return code
