"""What a run of the emulator found: findings with the kernel's lines, and counters."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...generator.errors import EmulatorError
from .host_text import HostText

_PLACE = re.compile(r"(?P<file>(?!pc:)[^:]+):(?P<line>\d+)$")
_PC = re.compile(r"pc:(0x[0-9a-f]+)")
_UBSAN = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):\d+: runtime error: (?P<message>.+)$", re.MULTILINE)
_ASAN = re.compile(r"ERROR: AddressSanitizer:? (?P<message>[^\n]+)")
_FRAME = re.compile(r"^\s+#\d+ 0x[0-9a-f]+ (?:in )?.*?(?P<file>[^\s():]+):(?P<line>\d+)(?::\d+)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. `kind` is its class; `file` and `line` say where in the kernel's text, as people read it.

    Kinds: race, deadlock, divergence, out-of-bounds, misaligned, read-only, uninitialised, in-flight, barrier, fence,
    operand, state (counters that a launch must leave at 0), crash, timeout, address (AddressSanitizer), undefined
    (UndefinedBehaviorSanitizer).
    """

    kind: str
    message: str
    file: str | None = None
    line: int | None = None
    block: int | None = None
    thread: int | None = None
    code: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " if self.file else ""
        code = f"\n    {self.code}" if self.code else ""
        block = f" (block {self.block})" if self.block is not None else ""
        return f"{where}{self.kind}: {self.message}{block}{code}"

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "message", "file", "line", "block", "thread", "code")}


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run.

    - `counters`: executions by primitive; warp-wide ones count once a warp, the others once a thread.
    - `bank_conflicts`: by line, the passes that ldmatrix took beyond one a matrix. Empty with a good swizzle.
    - `repeated`: findings of a kind and place that is already in `findings`.
    """

    findings: tuple[Finding, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    bank_conflicts: Mapping[int, int] = field(default_factory=dict)
    repeated: int = 0
    flavour: str = "plain"
    schedule: str = "round_robin"
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether no rule was broken. Bank conflicts break none."""
        return not self.findings

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(finding.kind for finding in self.findings)

    def __str__(self) -> str:
        head = f"{self.flavour}, {self.schedule}: {len(self.findings) or 'no'} findings"
        return "\n".join([head, *(str(finding) for finding in self.findings)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "flavour": self.flavour,
            "schedule": self.schedule,
            "clean": self.clean,
            "findings": [finding.to_dict() for finding in self.findings],
            "counters": dict(self.counters),
            "bank_conflicts": dict(self.bank_conflicts),
            "repeated": self.repeated,
            "seconds": self.seconds,
        }

    def require_clean(self) -> Report:
        """This report, if it is clean. Raises EmulatorError with the first finding otherwise."""
        if self.clean:
            return self
        first, *others = self.findings
        more = f" ({len(others)} more findings)" if others else ""
        raise EmulatorError(
            f"The kernel broke a rule in the emulator ({self.flavour}, {self.schedule}): {first}{more}",
            report=str(self),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the program's process ended: `program` ran for `seconds`, wrote `stderr`, and left `returncode`."""

    program: Path
    returncode: int
    stderr: str
    seconds: float


def read_report(path: Path, outcome: Outcome, text: HostText, *, flavour: str, schedule: str) -> Report:
    """The report of one run: the engine's own findings, then the sanitizers', then how the process ended."""
    raw = path.read_text() if path.exists() else ""
    entries = [json.loads(line) for line in _with_symbols(raw, outcome.program).splitlines()]
    tail: dict[str, Any] = next((entry for entry in entries if "counters" in entry), {})
    findings = [_finding(entry) for entry in entries if "counters" not in entry]
    findings += _sanitizer_findings(outcome.stderr, text.file_name)
    if outcome.returncode != 0 and not findings:
        last = (outcome.stderr.strip().splitlines() or ["no message"])[-1]
        findings.append(Finding("crash", f"the process ended with status {outcome.returncode}: {last}"))
    if not tail and not findings:
        findings.append(Finding("crash", "the process ended without a report: what was compiled is not the kernel"))
    return Report(
        findings=tuple(_with_code(finding, text) for finding in findings),
        counters=tail.get("counters", {}),
        bank_conflicts={int(line): n for line, n in tail.get("conflicts", {}).items()},
        repeated=tail.get("repeated", 0),
        flavour=flavour,
        schedule=schedule,
        seconds=outcome.seconds,
    )


def _finding(entry: dict[str, Any]) -> Finding:
    """One finding of the engine; a plain load or store has its place in "pc", as "file:line" if that is known."""
    known = _PLACE.match(entry.pop("pc"))
    if known is not None:
        entry |= {"file": known["file"], "line": int(known["line"])}
    return Finding(**{**entry, "line": entry["line"] or None})


def _with_code(finding: Finding, text: HostText) -> Finding:
    if finding.file != text.file_name or not finding.line or finding.line > len(text.lines):
        return finding
    return replace(finding, code=text.lines[finding.line - 1].strip())


def _sanitizer_findings(stderr: str, file_name: str) -> list[Finding]:
    found = []
    for match in _UBSAN.finditer(stderr):
        found.append(Finding("undefined", match["message"], Path(match["file"]).name, int(match["line"])))
    error = _ASAN.search(stderr)
    if error is not None:
        message = re.sub(r" (?:on|at) (?:unknown )?(?:address|pc|0x)[^\n]*", "", error["message"])
        frames = [f for f in _FRAME.finditer(stderr, error.end()) if Path(f["file"]).name == file_name]
        where = (file_name, int(frames[0]["line"])) if frames else (None, None)
        found.append(Finding("address", message.strip(), *where))
    return found


def _with_symbols(text: str, program: Path) -> str:
    """`text` with code addresses turned into "file:line", where addr2line or llvm-symbolizer is installed."""
    addresses = sorted(set(_PC.findall(text)))
    if not addresses:
        return text
    # A return address points behind the call.
    lines = _lines_of(program, [hex(int(address, 16) - 1) for address in addresses])
    places = dict(zip(addresses, lines, strict=True))
    return _PC.sub(lambda match: places[match[1]] or match[0], text)


def _lines_of(program: Path, addresses: list[str]) -> list[str | None]:
    for tool in (["addr2line", "-e"], ["llvm-symbolizer", "--output-style=GNU", "-f=none", "-e"]):
        try:
            command = [*tool, str(program), *addresses]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        lines = [re.sub(r" \(discriminator \d+\)$", "", line) for line in done.stdout.strip().splitlines()]
        if len(lines) == len(addresses):
            places = [re.search(r"([^/]+):(\d+)$", line) for line in lines]
            return [f"{place[1]}:{place[2]}" if place else None for place in places]
    return [None] * len(addresses)
