"""Every case of the conformance program, and which of them a GPU can run."""

from __future__ import annotations

from .conformance_hopper import hopper_cases
from .conformance_kernels import Case, all_cases

#: The compute capability whose instructions the Hopper cases need.
HOPPER = "9.0"


def cases_for(cc: str) -> tuple[Case, ...]:
    """The cases that a GPU of compute capability `cc` ("8.0") can run, in a fixed order."""
    return (*all_cases(), *(hopper_cases() if cc == HOPPER else ()))


def every_case() -> dict[str, Case]:
    """All cases by name."""
    return {case.name: case for case in cases_for(HOPPER)}
