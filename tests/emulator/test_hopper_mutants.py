"""Every statement of a Hopper kernel that orders its threads is needed: without it, the emulator reports.

A mutant lacks one wait, arrival, fence, commit or sync, waits for the other parity or one group too few, or announces
the wrong number of bytes. It must break a rule in some flavour, or compute something else, for one of the shapes.
Mutants that mean the same as the kernel are listed with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from helpers_hopper import hopper_mutants
from helpers_mutants import Mutant

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families.forward_sm90 import ForwardSm90, ForwardSm90Config
from flashsmith.generator.rendering import render
from flashsmith.generator.source import KernelSource
from flashsmith.runtime.emulator.forward import emulate_forward
from flashsmith.runtime.problem import Problem, problem_of

ARCH = ARCHS["sm_90"]
FLAVOURS = (("race", "round_robin"), ("plain", "greedy"), ("plain", "random"), ("plain", "reverse_greedy"))
#: Many tiles of rows that see one tile of keys or none, and a few with several.
SIZES = ((900, 24), (400, 300))
#: In the loop over unmasked tiles nothing reads S_ij between the two waits, and K_j's place is taken again only after
#: V_{j+1}'s, which is released behind the second wait.
NOT_NEEDED_THERE = ("wgmma_commit_group()", "wgmma_wait_group<1>()")


def far(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx - kv_idx >= 20) | (kv_idx - q_idx >= 20)


@dataclass(frozen=True)
class Kernel:
    """One generated kernel; `unmasked` is a text in its loop over tiles that every row sees."""

    config: ForwardSm90Config
    problem: Problem
    unmasked: str

    def __str__(self) -> str:
        return f"{self.problem.spec}, {self.config}"


KERNELS = (
    Kernel(
        ForwardSm90Config(2, 32, 2, 2, "optimistic", True, "dynamic", "registers", False),
        problem_of(dtype="bf16", head_dim=64, mask_mod=far),  # tiles are classified one by one
        "for (; j >= visit.j_begin && is_full(",
    ),
    Kernel(
        ForwardSm90Config(2, 32, 2, 1, "exact", False, "static", "registers", False),
        problem_of(dtype="bf16", head_dim=64, causal=True),
        "tiles that every row sees",
    ),
)
#: P_ij in shared memory: its fence, and its two barriers, of which the turn's may be one.
SHARED_KERNELS = (
    Kernel(
        ForwardSm90Config(2, 32, 2, 2, "exact", True, "dynamic", "shared"),
        problem_of(dtype="bf16", head_dim=64, mask_mod=far),
        "for (; j >= visit.j_begin && is_full(",
    ),
    Kernel(
        ForwardSm90Config(2, 32, 2, 1, "optimistic", False, "static", "shared"),
        problem_of(dtype="bf16", head_dim=64),
        "tiles that every row sees",
    ),
)


@cache
def inputs(seqlen_q: int, seqlen_k: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(1, seqlen_q, 1, 64, dtype=torch.bfloat16)
    return q, *(torch.randn(1, seqlen_k, 1, 64, dtype=torch.bfloat16) for _ in range(2))


def run(kernel: Kernel, source: KernelSource, sizes: tuple[int, int], **options: Any) -> Any:
    spec, mask = kernel.problem.spec, kernel.problem.mask
    return emulate_forward(
        spec, kernel.config, ARCH, *inputs(*sizes), mask=mask, source=source, max_blocks=1, **options
    )


@cache
def source_of(kernel: Kernel) -> KernelSource:
    return render(kernel.problem.spec, kernel.config, ARCH, family=ForwardSm90())


@cache
def expected(kernel: Kernel, sizes: tuple[int, int]) -> torch.Tensor:
    out, _, report = run(kernel, source_of(kernel), sizes)
    assert report.clean, report
    return out


def reports_something(mutant: Mutant, kernel: Kernel) -> bool:
    """Whether some flavour has a finding for the mutant, or the kernel's own output differs from it."""
    for sizes in SIZES:
        for flavour, schedule in FLAVOURS:
            out, _, report = run(kernel, mutant.source, sizes, flavour=flavour, schedule=schedule)
            if not report.clean or not torch.equal(out, expected(kernel, sizes)):
                return True
    return False


def equivalents(kernel: Kernel, mutants: tuple[Mutant, ...]) -> set[str]:
    """The mutants that mean the same as the kernel: see NOT_NEEDED_THERE."""
    lines = source_of(kernel).text.split("\n")
    begin = next(number for number, line in enumerate(lines, start=1) if kernel.unmasked in line)
    found = set()
    for call in NOT_NEEDED_THERE:
        line = min(m.line for m in mutants if m.line > begin and m.change.endswith(call))
        found |= {str(m) for m in mutants if m.line == line and m.change.endswith(call)}
    return found


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_ordering_statement_is_needed(kernel: Kernel) -> None:
    mutants = tuple(hopper_mutants(source_of(kernel)))
    kinds = {mutant.change.split("(")[0].split("<")[0] for mutant in mutants}
    assert kinds >= {
        "delete barrier_sync", "delete fence_mbarrier_init", "delete fence_proxy_async", "delete mbarrier_wait",
        "delete mbarrier_arrive", "delete mbarrier_arrive_expect_tx", "announce nothing in mbarrier_arrive_expect_tx",
        "delete wgmma_fence", "delete wgmma_commit_group", "delete wgmma_wait_group", "weaken wgmma_wait_group",
        "delete bulk_commit_group", "delete bulk_wait_group_read", "weaken bulk_wait_group",
        "delete named_barrier_sync",
    }  # fmt: skip
    assert ("delete named_barrier_arrive" in kinds) == kernel.config.pingpong
    assert ("delete warp_sync" in kinds) == (kernel.config.schedule == "dynamic")
    survivors = {str(mutant) for mutant in mutants if not reports_something(mutant, kernel)}
    assert survivors == equivalents(kernel, mutants)
    assert len(survivors) == 3


@pytest.mark.parametrize("kernel", SHARED_KERNELS, ids=str)
def test_every_ordering_statement_around_p_in_shared_memory_is_needed(kernel: Kernel) -> None:
    mutants = tuple(hopper_mutants(source_of(kernel)))
    changes = [mutant.change for mutant in mutants]
    # In the turns' kernel: after the softmax of the first tile and of both loops, and after O_i's rows; before P_ij is
    # written in the loops, before the last product, and after O_i's rows. In the other: after both softmax; before both
    # write, and before both products.
    assert changes.count("delete fence_proxy_async()") == (4 if kernel.config.pingpong else 2)
    assert changes.count("delete named_barrier_sync(8 + warpgroup, 128)") == 4
    survivors = {str(mutant) for mutant in mutants if not reports_something(mutant, kernel)}
    assert survivors == equivalents(kernel, mutants)


def test_a_mutant_differs_by_the_one_statement() -> None:
    lines = source_of(KERNELS[0]).text.split("\n")
    mutants = tuple(hopper_mutants(source_of(KERNELS[0])))
    assert len(mutants) > 60
    for mutant in mutants:
        changed = mutant.source.text.split("\n")
        assert changed[: mutant.line - 1] == lines[: mutant.line - 1]
        assert changed != lines
        tail = len(lines) - mutant.line - 4  # a statement takes up to 3 lines
        assert changed[-tail:] == lines[-tail:]
