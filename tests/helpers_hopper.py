"""Mutants of a generated Hopper kernel: each lacks one statement that orders its threads, or waits for too little."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from helpers_mutants import Mutant

from flashsmith.generator.source import KernelSource

#: Statements that order threads, copies, products or memory.
_ORDERING = re.compile(
    r"^(?P<indent> *(?:if \([^;{]*\) )?)"
    r"(?P<call>(?:\w*barrier_(?:sync|arrive|wait)\w*|warp_sync|fence_\w+|wgmma_(?:fence|commit_group|wait_group)"
    r"|bulk_(?:commit_group|wait_group(?:_read)?))(?:<\d>)?\([^;]*\));",
    re.MULTILINE,
)


def hopper_mutants(source: KernelSource) -> Iterator[Mutant]:
    """Every mutant of the kernel's section: a statement deleted, a wait for one group less, an announcement changed."""
    kernel = source.section("kernel").text
    first_line = source.text[: source.text.index(kernel)].count("\n") + 1
    for match in _ORDERING.finditer(kernel):
        call = match["call"]
        changes = [("delete", "")]
        if re.search(r"_wait_group(?:_read)?<", call):
            changes.append(("weaken", re.sub(r"<(\d)>", lambda m: f"<{int(m[1]) + 1}>", call)))
        if "expect_tx" in call:
            changes.append(("announce nothing in", re.sub(r"_expect_tx\((.*), [^,]*\)$", r"(\1)", call, flags=re.S)))
            changes.append(("announce 64 bytes less in", call[:-1] + " - 64)"))
        if call.startswith("mbarrier_wait"):
            changes.append(("wait for the other parity in", call[:-1] + " ^ 1)"))
        for verb, text in changes:
            mutated = kernel[: match.start()] + f"{match['indent']}{text};" + kernel[match.end() :]
            mutated = mutated if text else kernel[: match.start()] + f"{match['indent']};" + kernel[match.end() :]
            sections = tuple(replace(s, text=mutated) if s.name == "kernel" else s for s in source.sections)
            line = first_line + kernel.count("\n", 0, match.start())
            yield Mutant(replace(source, sections=sections), f"{verb} {' '.join(call.split())}", line)
