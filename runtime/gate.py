"""What ptxas says about a compiled kernel, and the gate that refuses the slow ones.

A spilled register, a stack frame or a serialised wgmma costs more than any tuned choice gains; such a kernel is never
run. Sources: the log of `--ptxas-options=-v`, read on NVRTC 12.4, 12.9, 13.0 and 13.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..generator.errors import BuildGateError, CompileError

#: ptxas's performance advisories that no kernel may carry: C7508 setmaxnreg was ignored; C7510 and C7514 wgmma was
#: serialised (for one reason each).
REFUSED_ADVISORIES = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514")

_REGISTERS = re.compile(r"\bUsed (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_CUMULATIVE_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_SMEM = re.compile(r"(\d+) bytes smem")
_ADVISORY = re.compile(r"\(C7\d{3}\)")
_PREFIX = re.compile(r"^ptxas\s*(info|warning)?\s*[:.]\s*")


@dataclass(frozen=True, slots=True)
class ResourceReport:
    """ptxas's report on one cubin. Bytes are per thread, save `smem_bytes`: static shared memory per block.

    `warnings` holds each warning of NVRTC and each advisory (C7xxx) of ptxas once, in order.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    smem_bytes: int
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.registers} registers", f"{self.spill_store_bytes}/{self.spill_load_bytes} bytes spilled"]
        parts.append(f"{self.stack_bytes} bytes stack")
        if self.warnings:
            parts.append(f"{len(self.warnings)} warnings")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": list(self.warnings)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ResourceReport:
        """The report `to_dict` wrote. Raises ValueError for anything else."""
        numbers = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "smem_bytes")
        warnings = data.get("warnings")
        if set(data) != {*numbers, "warnings"} or not all(type(data[n]) is int for n in numbers):
            raise ValueError("not a resource report")
        if not isinstance(warnings, list) or not all(isinstance(w, str) for w in warnings):
            raise ValueError("not a resource report")
        return cls(**{n: data[n] for n in numbers}, warnings=tuple(warnings))


def parse_report(log: str) -> ResourceReport:
    """The report in an NVRTC log. Over several functions: the largest register count and stack, all spills summed.

    Raises CompileError where the log has no such report: a gate that cannot read must not open.
    """
    registers = [int(n) for n in _REGISTERS.findall(log)]
    frames = [tuple(map(int, found)) for found in _FRAME.findall(log)]
    if not registers or not frames:
        raise CompileError(
            "Every compile must end with ptxas's resource report, but this log has none, so its spills are unknown."
            " Use an NVRTC from 12.4 to 13.x, and report this with the log.",
            log=log,
        )
    return ResourceReport(
        registers=max(registers),
        spill_store_bytes=sum(frame[1] for frame in frames),
        spill_load_bytes=sum(frame[2] for frame in frames),
        stack_bytes=max([frame[0] for frame in frames] + [int(n) for n in _CUMULATIVE_STACK.findall(log)]),
        smem_bytes=max([int(n) for n in _SMEM.findall(log)], default=0),
        warnings=_warnings(log),
    )


def gate_reasons(report: ResourceReport) -> tuple[str, ...]:
    """Why the gate refuses a kernel with `report`, one sentence part a reason; empty for a good one."""
    reasons = []
    if report.spill_store_bytes or report.spill_load_bytes:
        reasons.append(f"{report.spill_store_bytes} bytes of spill stores and {report.spill_load_bytes} of spill loads")
    if report.stack_bytes:
        reasons.append(f"a stack frame of {report.stack_bytes} bytes")
    reasons += [w for w in report.warnings if any(f"({code})" in w for code in REFUSED_ADVISORIES)]
    return tuple(reasons)


def check_gate(report: ResourceReport, *, what: str = "this kernel") -> None:
    """Raises BuildGateError where `report` breaks the gate; `what` names the kernel in the message."""
    reasons = gate_reasons(report)
    if reasons:
        raise BuildGateError(
            "A kernel must keep its values in registers and its tensor-core instructions asynchronous, but ptxas"
            f" reports for {what} ({report.registers} registers): {'; '.join(reasons)}."
            " Lower B_r or B_c, use more warps, or ask for fewer blocks per SM.",
            log="\n".join(report.warnings),
        )


def _warnings(log: str) -> tuple[str, ...]:
    found = []
    for line in log.splitlines():
        if ": warning " in line or line.startswith("ptxas warning") or _ADVISORY.search(line):
            found.append(_PREFIX.sub("", line).strip())
    return tuple(dict.fromkeys(found))
