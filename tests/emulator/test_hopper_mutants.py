"""Every statement of a Hopper kernel that orders its threads is needed: without it, the emulator reports.

A mutant lacks one wait, arrival, fence, commit or sync, waits for the other parity or one group too few, or announces
the wrong number of bytes. It must break a rule in some flavour, or compute something else, for one of the shapes.
Mutants that mean the same as the kernel are listed with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
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
#: (seqlen_q, seqlen_k, what Q is multiplied by): many tiles of rows that see one tile of keys or none, and a few with
#: several; scores so far apart that the optimistic softmax gives way to the exact one; many tiles to pass by.
SIZES = ((900, 24, 1.0), (400, 300, 1.0))
WILD, LONG = (300, 300, 100.0), (500, 500, 1.0)
#: In the loop over unmasked tiles nothing reads S_ij between the two waits, and K_j's place is taken again only after
#: V_{j+1}'s, which is released behind the second wait.
NOT_NEEDED_THERE = ("wgmma_commit_group()", "wgmma_wait_group<1>()")


def far(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx - kv_idx >= 20) | (kv_idx - q_idx >= 20)


@dataclass(frozen=True)
class Kernel:
    """One generated kernel; `unmasked` are texts in its loops over tiles that every row sees.

    `spared`: a text, and a call behind it without which the emulator's schedules go as well. `sizes`: beyond SIZES.
    """

    config: ForwardSm90Config
    problem: Problem
    unmasked: tuple[str, ...]
    spared: tuple[tuple[str, str], ...] = ()
    sizes: tuple[tuple[int, int, float], ...] = ()

    def __str__(self) -> str:
        return f"{self.problem.spec}, {self.config}"


#: A warp that passes a tile by, or has no key to look at, waits for its lanes, so that none still asks for a phase when
#: the next one is over too. That takes a lane that sleeps while the others go through several tiles: the emulator's
#: schedules have it for K_j where there are many tiles in a row to pass, for V_j and Q_i never.
PASSED_K = ("mbarrier_wait(smem.k_full", "warp_sync()")
PASSED_V = ("mbarrier_wait(smem.v_full", "warp_sync()")
PASSED_Q = ("// O_i += P V of the last tile", "warp_sync()")
#: One buffer of Q_i: its next rows, and so the tile after them, wait for consumers that have read this tile.
TOLD = (
    ("void tell_tile(", "mbarrier_wait(smem.tile_empty + next.stage() * 8, next.parity() ^ 1)"),
    ("= read_tile(", "warp_sync()"),
)
KERNELS = (
    Kernel(
        ForwardSm90Config(2, 32, 2, 2, "optimistic", True, "dynamic", "registers", False),
        problem_of(dtype="bf16", head_dim=64, mask_mod=far),  # tiles are classified one by one
        ("for (; wild && ", "for (; j >= visit.j_begin && is_full("),
        sizes=(WILD,),
    ),
    Kernel(
        ForwardSm90Config(3, 16, 2, 2, "exact", False, "static", "registers", False),
        problem_of(dtype="bf16", head_dim=64, causal=True),  # a warpgroup passes up to 8 tiles of the others by
        ("tiles that every row sees",),
        (PASSED_V,),
        (LONG,),
    ),
)
#: P_ij in shared memory: its fence, and its two barriers, of which the turn's may be one.
SHARED_KERNELS = (
    Kernel(
        ForwardSm90Config(2, 32, 2, 2, "exact", True, "dynamic", "shared", False),
        problem_of(dtype="bf16", head_dim=64, mask_mod=far),
        ("for (; j >= visit.j_begin && is_full(",),
    ),
    Kernel(
        ForwardSm90Config(2, 32, 2, 1, "optimistic", False, "static", "shared", False),
        problem_of(dtype="bf16", head_dim=64, causal=True),
        ("for (; wild && ", "tiles that every row sees"),
        (PASSED_K, PASSED_V, PASSED_Q, *TOLD),
        (WILD,),
    ),
)


@cache
def inputs(seqlen_q: int, seqlen_k: int, scale: float) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(1, seqlen_q, 1, 64, dtype=torch.bfloat16) * scale
    return q, *(torch.randn(1, seqlen_k, 1, 64, dtype=torch.bfloat16) for _ in range(2))


def run(kernel: Kernel, source: KernelSource, sizes: tuple[int, int, float], **options: Any) -> Any:
    spec, mask = kernel.problem.spec, kernel.problem.mask
    return emulate_forward(
        spec, kernel.config, ARCH, *inputs(*sizes), mask=mask, source=source, max_blocks=1, **options
    )


@cache
def source_of(kernel: Kernel) -> KernelSource:
    return render(kernel.problem.spec, kernel.config, ARCH, family=ForwardSm90())


@cache
def expected(kernel: Kernel, sizes: tuple[int, int, float]) -> torch.Tensor:
    out, _, report = run(kernel, source_of(kernel), sizes)
    assert report.clean, report
    return out


def reports_something(mutant: Mutant, kernel: Kernel) -> bool:
    """Whether some flavour has a finding for the mutant, or the kernel's own output differs from it."""
    for sizes in (*SIZES, *kernel.sizes):
        for flavour, schedule in FLAVOURS:
            out, _, report = run(kernel, mutant.source, sizes, flavour=flavour, schedule=schedule)
            if not report.clean or not torch.equal(out, expected(kernel, sizes)):
                return True
    return False


def equivalents(kernel: Kernel, mutants: tuple[Mutant, ...]) -> set[str]:
    """The mutants that mean the same as the kernel, see NOT_NEEDED_THERE, and what it is spared."""
    lines = source_of(kernel).text.split("\n")
    found = set()
    for text, call in (*product(kernel.unmasked, NOT_NEEDED_THERE), *kernel.spared):
        begin = next(number for number, line in enumerate(lines, start=1) if text in line)
        weaker = (f"delete {call}", f"weaken {call}")
        line = min(m.line for m in mutants if m.line > begin and m.change in weaker)
        found |= {str(m) for m in mutants if m.line == line and m.change in weaker}
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
        "delete named_barrier_sync", "delete warp_sync",
    }  # fmt: skip
    assert ("delete named_barrier_arrive" in kinds) == kernel.config.pingpong
    survivors = {str(mutant) for mutant in mutants if not reports_something(mutant, kernel)}
    assert survivors == equivalents(kernel, mutants)
    assert len(survivors) == 3 * len(kernel.unmasked) + len(kernel.spared)


@pytest.mark.parametrize("kernel", SHARED_KERNELS, ids=str)
def test_every_ordering_statement_around_p_in_shared_memory_is_needed(kernel: Kernel) -> None:
    mutants = tuple(hopper_mutants(source_of(kernel)))
    changes = [mutant.change for mutant in mutants]
    # In the turns' kernel: after the softmax of the first tile and of both loops, and after O_i's rows; before P_ij is
    # written in the loops, before the last product, and after O_i's rows. In the other: after the softmax of the first
    # tile and of three loops; before P_ij is written and before each product, and where warps tell if they are wild.
    assert changes.count("delete fence_proxy_async()") == 4
    assert changes.count("delete named_barrier_sync(8 + warpgroup, 128)") == (4 if kernel.config.pingpong else 9)
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
