"""Mutants of a generated kernel: each lacks one statement that orders its threads, or waits for too little."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashsmith.generator.source import KernelSource

#: Statements that order threads, copies or memory: today's primitives and the names later families will use.
_ORDERING = re.compile(
    r"^(?P<indent> *)(?:\w*(?:barrier|warp|fence|cp_async|wgmma|tma)\w*_(?:sync|wait|commit|fence|arrive)\w*|fence_\w+)"
    r"(?:<[^;]*>)?\([^;]*\);",
    re.MULTILINE,
)
_WAIT = re.compile(r"(?P<call>cp_async_wait_group)<(?P<groups>[^;]*)>\(\);")


@dataclass(frozen=True)
class Mutant:
    """`source` differs from the kernel by one statement; `change` says which, `line` is where it stood."""

    source: KernelSource
    change: str
    line: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.change}"


def mutants_of(source: KernelSource) -> Iterator[Mutant]:
    """Every mutant of the kernel's section: one statement deleted, or one wait that leaves one more group in flight."""
    kernel = source.section("kernel").text
    first_line = source.text[: source.text.index(kernel)].count("\n") + 1
    for pattern, verb in ((_ORDERING, "delete"), (_WAIT, "weaken")):
        for match in pattern.finditer(kernel):
            if verb == "delete":
                text = f"{match['indent']};"
            else:
                text = f"{match['call']}<({match['groups']}) + 1>();"
            mutated = kernel[: match.start()] + text + kernel[match.end() :]
            sections = tuple(replace(s, text=mutated) if s.name == "kernel" else s for s in source.sections)
            line = first_line + kernel.count("\n", 0, match.start())
            yield Mutant(replace(source, sections=sections), f"{verb} {match[0].strip()}", line)
