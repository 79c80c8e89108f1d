"""`flashsmith doctor`: what this machine has, what is missing, and the remedy."""

from __future__ import annotations

import typer

from . import options as o
from .output import console, print_json

EXAMPLES = ("flashsmith doctor", "flashsmith doctor --json")
_MARKS = {"ok": "ok", "warning": "warn", "missing": "MISSING"}


def command(as_json: o.AsJson = False) -> None:
    """Check what this machine has and lacks.

    Python, torch, NVRTC, driver, GPU, folders, C++ compiler: what was found, what is needed, and the remedy.
    Exit code 1 if something is missing.
    """
    from ... import __version__
    from ..doctor import MISSING, diagnose
    from ..variables import VARIABLES

    checks = diagnose()
    healthy = all(check.status != MISSING for check in checks)
    if as_json:
        print_json(
            {
                "flashsmith": __version__,
                "healthy": healthy,
                "checks": [check.to_dict() for check in checks],
                "variables": {variable.name: variable.value for variable in VARIABLES},
            }
        )
    else:
        out = console()
        out.print(f"flashsmith {__version__}")
        for check in checks:
            out.print(f"{_MARKS.get(check.status, check.status):8}{check.name}: {check.found}", markup=False)
            if check.remedy:
                out.print(f"{'':8}needed: {check.needed}\n{'':8}remedy: {check.remedy}", markup=False)
    if not healthy:
        raise typer.Exit(1)
