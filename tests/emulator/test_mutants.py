"""Every statement of a kernel that orders threads or copies is needed: without it, the emulator reports.

A mutant lacks one barrier, warp_sync, commit or wait, or waits for one group too few. It must break a rule in some
flavour, or compute something else. Mutants that mean the same as the kernel are listed with the reason.
"""

from __future__ import annotations

import pytest
import torch
from helpers_mutants import Mutant, mutants_of

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families.forward_sm80 import ForwardSm80Config
from flashsmith.generator.rendering import render
from flashsmith.runtime.emulator.forward import emulate_forward
from flashsmith.runtime.problem import problem_of

ARCH = ARCHS["sm_80"]
# More rows than keys: the first block sees no key at all, the last one several tiles of them.
SEQLEN_Q, SEQLEN_K = 220, 140
FLAVOURS = (("race", "round_robin"), ("plain", "greedy"), ("plain", "random"), ("asan", "reverse"))

CONFIGS = (
    ForwardSm80Config(64, 32, 4, 1, False, "exact", "linear", 1),
    ForwardSm80Config(64, 32, 2, 1, True, "exact", "longest_first", 1),
    ForwardSm80Config(64, 32, 2, 2, True, "optimistic", "linear", 1),
    ForwardSm80Config(64, 32, 2, 3, False, "optimistic", "linear", 1),
)


def equivalent_reason(mutant: Mutant, config: ForwardSm80Config) -> str | None:
    """Why the mutant means the same as the kernel, or None if it does not."""
    last_wait = max(m.line for m in mutants_of_unmutated(config) if "cp_async_wait_group" in m.change)
    if mutant.line != last_wait:
        return None
    if config.q_in_registers:
        return "Q_i, the only copy that an empty row block could leave in flight, was waited for before the loop"
    if config.num_stages > 2 and mutant.change.startswith("weaken"):
        return "the newest group is empty: with three stages two groups are committed before the loop, Q_i in the older"
    return None


def mutants_of_unmutated(config: ForwardSm80Config) -> tuple[Mutant, ...]:
    problem = problem_of(dtype="bf16", head_dim=64, causal=True)
    return tuple(mutants_of(render(problem.spec, config, ARCH)))


def reports_something(mutant: Mutant, config: ForwardSm80Config) -> bool:
    """Whether some flavour has a finding for the mutant, or the kernel's own output differs from it."""
    problem = problem_of(dtype="bf16", head_dim=64, causal=True)
    torch.manual_seed(0)
    q = torch.randn(1, SEQLEN_Q, 1, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, SEQLEN_K, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    expected, _, report = emulate_forward(problem.spec, config, ARCH, q, k, v, mask=problem.mask)
    assert report.clean
    for flavour, schedule in FLAVOURS:
        out, _, report = emulate_forward(
            problem.spec, config, ARCH, q, k, v,
            mask=problem.mask, flavour=flavour, schedule=schedule, source=mutant.source,
        )  # fmt: skip
        if not report.clean or not torch.equal(out, expected):
            return True
    return False


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_ordering_statement_is_needed(config: ForwardSm80Config) -> None:
    mutants = mutants_of_unmutated(config)
    kinds = {mutant.change.split("(")[0].split("<")[0] for mutant in mutants}
    assert kinds == {
        "delete barrier_sync", "delete warp_sync", "delete cp_async_commit_group", "delete cp_async_wait_group",
        "weaken cp_async_wait_group",
    }  # fmt: skip
    survivors = {str(mutant) for mutant in mutants if not reports_something(mutant, config)}
    equivalent = {str(mutant) for mutant in mutants if equivalent_reason(mutant, config)}
    assert survivors == equivalent
    assert len(equivalent) <= 2


def test_a_mutant_differs_by_the_one_statement() -> None:
    problem = problem_of(dtype="bf16", head_dim=64, causal=True)
    source = render(problem.spec, CONFIGS[0], ARCH)
    lines = source.text.split("\n")
    for mutant in mutants_of(source):
        changed = mutant.source.text.split("\n")
        different = [i + 1 for i, (a, b) in enumerate(zip(lines, changed, strict=True)) if a != b]
        assert different == [mutant.line]
        verb, _, statement = mutant.change.partition(" ")
        assert statement in lines[mutant.line - 1]
        assert verb == "weaken" or statement not in changed[mutant.line - 1]
