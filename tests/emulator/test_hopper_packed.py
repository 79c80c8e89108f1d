"""Hopper kernels that pack the heads of a KV head into one tile: right, clean, and every part of the packing needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_hopper_forward import ARCH, FLAVOURS, Case, check, config, emulate, problem_and_inputs

from flashsmith.generator.errors import ConfigError
from flashsmith.generator.families.forward_sm90 import ForwardSm90
from flashsmith.generator.rendering import render
from flashsmith.generator.source import KernelSource
from flashsmith.runtime.verify import trials_for, verify_config

SLOPES = torch.tensor([[0.5, 0.25, 0.0, 2.0], [0.125, 1.0, 0.3, 0.05]])
DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([20, 1, 50, 19])).expand(2, -1).contiguous().int()


def same_document(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


def scaled_by_head(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return score * (h + 1) + 0.01 * (q_idx - kv_idx)


packed: Mapping[str, Any] = {"pack_gqa": True, "schedule": "static"}
taking: Mapping[str, Any] = {"pack_gqa": True, "schedule": "dynamic", "q_stages": 2, "softmax": "optimistic"}
CASES: Mapping[str, Case] = {
    "2 heads, ragged rows and keys, batch": Case(
        75, 101, config(2, 32, num_stages=3, **packed), heads=(4, 2), batch=2, blocks=3
    ),
    "4 heads, causal, output through shared memory": Case(
        77, 90, config(2, 48, pingpong=True, **taking), heads=(8, 2), blocks=2, call={"causal": True}
    ),
    "8 heads, one query, many keys": Case(
        1, 330, config(1, 64, **{**packed, "q_stages": 2}), heads=(16, 2), batch=2, dtype="fp16"
    ),
    "8 heads, window": Case(
        50, 160, config(2, 32, softmax="optimistic", **packed), heads=(8, 1), call={"window_size": (40, 5)}
    ),
    "8 heads, causal, more rows than keys": Case(90, 40, config(2, 32, **taking), heads=(8, 1), call={"causal": True}),
    "4 heads, ALiBi, causal": Case(
        45, 100, config(2, 32, **packed), heads=(4, 1), batch=2, call={"alibi_slopes": SLOPES, "causal": True}
    ),
    "8 heads, a score by head": Case(
        40, 70, config(1, 32, **packed), heads=(16, 2), call={"score_mod": scaled_by_head}
    ),
    "16 heads, both rows of a thread in one query": Case(9, 70, config(1, 32, **packed), heads=(16, 1)),
    "64 heads, a query a warpgroup": Case(3, 40, config(2, 32, **taking), heads=(64, 1), call={"causal": True}),
    "4 heads, documents, classified by tile": Case(
        90, 90, config(2, 32, **taking), heads=(8, 2), batch=2, call={"mask_mod": same_document}
    ),
    "a block per tile": Case(70, 70, config(2, 32, pack_gqa=True, schedule="grid"), heads=(2, 1)),
    "4 heads, head dims that fill no part": Case(
        33, 70, config(2, 32, **packed), heads=(4, 1), head_dim=72, head_dim_v=40
    ),
    "2 heads, wider values": Case(
        50, 70, config(1, 32, **taking), heads=(2, 1), head_dim=40, head_dim_v=72, call={"causal": True}
    ),
    "2 heads, three warpgroups": Case(140, 70, config(3, 32, **packed), heads=(2, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_right_and_clean_in_every_flavour(name: str) -> None:
    case = CASES[name]
    problem, q, k, v = problem_and_inputs(case)
    first = None
    for flavour, schedule in FLAVOURS:
        out, lse, report = emulate(case, problem, q, k, v, flavour=flavour, schedule=schedule)
        assert report.clean, report
        assert not report.bank_conflicts, report.bank_conflicts
        if first is None:
            first = out, lse
            check(problem, q, k, v, out=out, lse=lse)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


@pytest.mark.parametrize("layout", ["heads first", "packed", "keys of one head"])
def test_any_strides(layout: str) -> None:
    case = Case(70, 70, config(1, 32, **packed), heads=(8, 8), batch=2, dtype="fp16")
    problem, q, k, v = problem_and_inputs(case)
    k, v = k[:, :, ::4], v[:, :, 3::4]
    if layout == "heads first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "packed":  # all heads of q, k and v behind one another
        q, k, v = torch.cat((q, k, v), dim=2).split([8, 2, 2], dim=2)
    else:
        k, v = k[:, :, :1], v[:, :, :1]
    out, lse, report = emulate(case, problem, q, k, v)
    assert report.clean, report
    check(problem, q, k, v, out=out, lse=lse)


def test_any_number_of_blocks_gives_the_same_bits() -> None:
    outputs = []
    for schedule, blocks in (("static", 1), ("dynamic", 2), ("dynamic", 5)):
        changes = {**taking, "schedule": schedule, "softmax": "exact"}
        case = Case(60, 70, config(1, 32, **changes), heads=(8, 2), blocks=blocks, call={"causal": True})
        problem, q, k, v = problem_and_inputs(case)
        for flavour in ("race", "plain"):
            out, _, report = emulate(case, problem, q, k, v, flavour=flavour, schedule="random", seed=blocks)
            assert report.clean, report
            outputs.append(out)
    for out in outputs[1:]:
        assert torch.equal(out, outputs[0])


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (24, 2), (128, 1)])
def test_a_group_that_cannot_be_packed_is_refused(heads: tuple[int, int]) -> None:
    case = Case(5, 7, config(1, 32, **packed), heads=heads)
    problem, q, k, v = problem_and_inputs(case)
    with pytest.raises(ConfigError, match=rf"divide 64, but got {heads[0] // heads[1]}\. Use pack_gqa=False"):
        emulate(case, problem, q, k, v)


def test_fewer_keys_are_loaded() -> None:
    """8 heads of 8 queries are one tile instead of eight."""
    loads = {}
    for pack_gqa in (False, True):
        case = Case(8, 200, config(1, 32, pack_gqa=pack_gqa), heads=(8, 1))
        loads[pack_gqa] = emulate(case, *problem_and_inputs(case))[2].counters["tma_load"]
    parts = 2 * 7  # 7 tiles of K and of V
    assert loads == {False: 8 * (parts + 1), True: parts + 1}


def test_verification_takes_groups_that_can_be_packed() -> None:
    for schedule in ("static", "dynamic"):
        the_config = config(1, 64, **{**taking, "schedule": schedule})
        for thorough in (False, True):
            trials = trials_for(the_config, thorough=thorough)
            assert all(ForwardSm90().shape_reason(None, the_config, trial.shape) is None for trial in trials)  # type: ignore[arg-type]
            assert len({trial.shape.gqa_ratio for trial in trials}) >= 2
    problem = problem_and_inputs(CASES["8 heads, window"])[0]
    assert verify_config(problem, config(1, 48, **packed), ARCH, device="emulator").ok


# ---- Mutants -----------------------------------------------------------------------------------------------------

#: What is said of rows, heads and queries -> the same without the packing, or with it a little off.
CHANGES = (
    ("row / group_size", "row"),
    ("row / group_size", "0"),
    ("row % group_size", "0"),
    ("row_first + half * 8;", "row_first;"),
    ("tile.i * B_r + warpgroup", "warpgroup"),
    ("h_k * args.group_size, i}", "h_k, i}"),
    ("head % nheads_k", "0"),
    ("head / nheads_k", "0"),
    ("args.nheads / args.group_size;", "args.nheads;"),
    ("const int queries = B_r / args.group_size;", "const int queries = B_r;"),
    ("const int queries = 64 / args.group_size;", "const int queries = 1;"),
    ("warpgroup * (64 / args.group_size)", "warpgroup * 64"),
    ("const int h_k = tile.h / args.group_size;", "const int h_k = tile.h;"),
    ("tile.h / args.group_size,", "tile.h,"),
    ("rows.h[e / 2 % 2]", "tile.h"),
    ("rows.q_idx[e / 2 % 2]", "rows.q_idx[0]"),
    ("args.nheads + rows.h[half]", "args.nheads + tile.h"),
    ("rows.q_idx[half]", "rows.q_idx[0]"),
    ("rows.h[half] * args.o_stride_h", "tile.h * args.o_stride_h"),
)
SLOPED = {"alibi_slopes": torch.cat([SLOPES, SLOPES.flip(1)], dim=1), "causal": True}
MUTATED = (
    Case(70, 90, config(2, 32, **taking), heads=(8, 2), batch=2, call=SLOPED),
    Case(70, 90, config(2, 32, **packed), heads=(8, 2), batch=2, call=SLOPED),
)


def with_change(source: KernelSource, old: str, new: str) -> KernelSource:
    kernel = source.section("kernel").text.replace(old, new)
    sections = tuple(replace(s, text=kernel) if s.name == "kernel" else s for s in source.sections)
    return replace(source, sections=sections)


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_every_part_of_the_packing_is_needed(old: str, new: str) -> None:
    found = 0
    for case in MUTATED:
        problem, q, k, v = problem_and_inputs(case)
        source = render(problem.spec, case.config, ARCH, family=ForwardSm90())
        if old not in source.section("kernel").text:
            continue
        found += 1
        out, lse, report = emulate(case, problem, q, k, v)
        assert report.clean, report
        wrong, wrong_lse, report = emulate(case, problem, q, k, v, source=with_change(source, old, new), time_limit=20)
        assert not report.clean or not torch.equal(wrong, out) or not torch.equal(wrong_lse, lse)
    assert found
