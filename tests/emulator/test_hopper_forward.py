"""Generated Hopper kernels in the emulator: right and clean in every flavour, for every feature a config can have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from helpers_hopper_forward import FLAVOURS, Case, check, config, emulate, problem_and_inputs

DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([70, 1, 90, 19])).expand(1, -1).contiguous().int()
SLOPES = torch.tensor([[0.5, 0.25], [0.125, 1.0]])


def same_document(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


persistent = {"schedule": "static", "q_stages": 2}
taking = {"schedule": "dynamic", "q_stages": 2, "softmax": "optimistic"}
CASES: Mapping[str, Case] = {
    "one tile": Case(64, 64, config(1, 64)),
    "ragged rows and keys": Case(150, 101, config(2, 32, num_stages=3)),
    "one row": Case(1, 129, config(2, 64), dtype="fp16"),
    "one key": Case(70, 1, config(1, 32, softmax="optimistic")),
    "a block takes every tile, groups of heads, batch": Case(
        130, 100, config(2, 48, **persistent), heads=(4, 2), batch=2, blocks=3
    ),
    "turns of two": Case(200, 330, config(2, 64, pingpong=True, softmax="optimistic")),
    "turns of three, one buffer for Q": Case(
        300, 150, config(3, 32, pingpong=True, schedule="static"), heads=(2, 1), blocks=2
    ),
    "four warpgroups, causal": Case(400, 260, config(4, 48, pingpong=True, **taking), call={"causal": True}),
    "causal, more keys than rows": Case(200, 300, config(2, 64, **taking), dtype="fp16", call={"causal": True}),
    "causal, tiles without a key": Case(500, 60, config(2, 32, pingpong=True, **taking), call={"causal": True}),
    "window": Case(200, 260, config(2, 32, softmax="optimistic"), call={"window_size": (40, 5)}),
    "documents, classified by tile": Case(180, 180, config(2, 32, **taking), call={"mask_mod": same_document}),
    "softcap, optimistic": Case(64, 300, config(1, 64, softmax="optimistic"), call={"softcap": 5.0}),
    "ALiBi": Case(
        70, 100, config(2, 32, **persistent), heads=(2, 1), batch=2, call={"alibi_slopes": SLOPES, "causal": True}
    ),
    "head dims that fill no part": Case(70, 70, config(2, 32), head_dim=72, head_dim_v=40),
    "head dim 80": Case(70, 100, config(2, 80, **persistent), head_dim=80, dtype="fp16"),
    "head dim 96, wide tile": Case(70, 200, config(1, 176), head_dim=96),
    "narrower values": Case(140, 100, config(2, 48, **persistent), head_dim=192, head_dim_v=128),
    "head dim 256": Case(140, 100, config(2, 48), head_dim=256),
    "P shared, ragged": Case(150, 203, config(2, 64, num_stages=3, p_operand="shared")),
    "P shared, turns, rows after rows": Case(
        300,
        330,
        config(2, 80, pingpong=True, softmax="wary", **persistent, p_operand="shared"),
        heads=(2, 1),
        dtype="fp16",
    ),
    "P shared, O from registers, rows after rows": Case(
        300, 150, config(1, 48, schedule="static", softmax="optimistic", p_operand="shared"), batch=2, head_dim=128
    ),
    "P shared, causal": Case(
        270, 300, config(3, 96, pingpong=True, **taking, p_operand="shared"), dtype="fp16", call={"causal": True}
    ),
    "P shared, window, head dim 128": Case(
        200, 260, config(2, 64, **persistent, p_operand="shared"), head_dim=128, call={"window_size": (40, 5)}
    ),
    "P shared, head dim 80": Case(
        140, 200, config(2, 80, softmax="optimistic", p_operand="shared"), head_dim=80, call={"causal": True}
    ),
    "P shared, documents": Case(
        180, 180, config(2, 32, **taking, p_operand="shared"), dtype="fp16", call={"mask_mod": same_document}
    ),
    "P shared, narrower values, odd steps": Case(
        70, 300, config(1, 176, p_operand="shared"), head_dim=72, head_dim_v=40, call={"softcap": 5.0}
    ),
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


@pytest.mark.parametrize("softmax", ["exact", "optimistic", "wary"])
def test_p_gives_the_same_bits_from_registers_and_from_shared_memory(softmax: str) -> None:
    cases = [
        Case(130, 400, config(2, 48, softmax=softmax, p_operand=name), call={"causal": True})
        for name in ("registers", "shared")
    ]
    problem, q, k, v = problem_and_inputs(cases[0], factor=8.0)
    (out, lse, _), (other_out, other_lse, report) = (emulate(case, problem, q, k, v) for case in cases)
    assert report.clean, report
    assert torch.equal(out, other_out)
    assert torch.equal(lse, other_lse)


@pytest.mark.parametrize("p_operand", ["registers", "shared"])
@pytest.mark.parametrize("softmax", ["optimistic", "wary"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_tile_that_overflows_is_redone(softmax: str, p_operand: str, dtype: str) -> None:
    case = Case(100, 400, config(2, 32, softmax=softmax, p_operand=p_operand), dtype=dtype)
    problem, q, k, v = problem_and_inputs(case)
    calm = emulate(case, problem, q, k, v)[2].counters
    k[:, :200] *= 300.0  # keys come from the last to the first: nothing of it shows in the first tile
    out, lse, report = emulate(case, problem, q, k, v)
    assert report.clean, report
    check(problem, q, k, v, out=out, lse=lse)
    assert report.counters["shfl_bfly_f32"] > calm["shfl_bfly_f32"], "no tile was redone"
    if softmax == "optimistic":  # a tile is voted on once, however it ends
        assert report.counters["vote_any"] == calm["vote_any"]


@pytest.mark.parametrize("softmax", ["exact", "optimistic", "wary"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_many_small_probabilities_count_beside_a_large_one(softmax: str, dtype: str) -> None:
    """The last key, met first, is e^13 above 511 others, whose values are all that is not 0."""
    case = Case(64, 512, config(1, 64, softmax=softmax), dtype=dtype)
    problem, q, k, v = problem_and_inputs(case)
    q, k, v = torch.zeros_like(q), torch.zeros_like(k), torch.full_like(v, 1000.0)
    q[..., 0], k[:, -1, :, 0], v[:, -1] = 1.0, 13.0 * 8.0, 0.0
    out, lse, report = emulate(case, problem, q, k, v)
    assert report.clean, report
    check(problem, q, k, v, out=out, lse=lse)


@pytest.mark.parametrize("softmax", ["optimistic", "wary"])
def test_the_narrowest_tile(softmax: str) -> None:
    case = Case(70, 200, config(1, 16, softmax=softmax), call={"causal": True})
    problem, q, k, v = problem_and_inputs(case, factor=128.0)
    out, lse, report = emulate(case, problem, q, k, v)
    assert report.clean, report
    check(problem, q, k, v, out=out, lse=lse)


@pytest.mark.parametrize("softmax", ["optimistic", "wary"])
@pytest.mark.parametrize(
    ("dtype", "factor", "wild"), [("bf16", 16.0, False), ("bf16", 128.0, True), ("fp16", 16.0, True)]
)
def test_scores_far_apart_are_taken_exactly_from_the_start(softmax: str, dtype: str, factor: float, wild: bool) -> None:
    for schedule, q_stages in (("static", 1), ("grid", 1), ("dynamic", 2)):
        case = Case(
            300, 400, config(2, 32, q_stages=q_stages, softmax=softmax, schedule=schedule), dtype=dtype, heads=(2, 2),
            call={"causal": True} if schedule == "dynamic" else {},
        )  # fmt: skip
        problem, q, k, v = problem_and_inputs(case)
        calm = emulate(case, problem, q, k, v)[2].counters
        q = q * factor
        out, lse, report = emulate(case, problem, q, k, v, flavour="race", schedule="random", seed=1)
        assert report.clean, report
        check(problem, q, k, v, out=out, lse=lse)
        # No tile that every row sees is voted on then.
        assert (report.counters["vote_any"] < 0.8 * calm["vote_any"]) == wild


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_any_number_of_blocks_gives_the_same_bits(schedule: str) -> None:
    outputs = []
    for blocks in (1, 2, 5):
        case = Case(
            200, 70, config(1, 32, q_stages=2, schedule=schedule), heads=(2, 1), blocks=blocks, call={"causal": True}
        )
        problem, q, k, v = problem_and_inputs(case)
        for flavour in ("race", "plain"):
            out, _, report = emulate(case, problem, q, k, v, flavour=flavour, schedule="random", seed=blocks)
            assert report.clean, report
            outputs.append(out)
    for out in outputs[1:]:
        assert torch.equal(out, outputs[0])


@pytest.mark.parametrize("layout", ["heads first", "packed", "offset"])
def test_any_strides(layout: str) -> None:
    case = Case(70, 70, config(1, 32), heads=(2, 2), batch=2, dtype="fp16")
    problem, q, k, v = problem_and_inputs(case)
    if layout == "heads first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "packed":
        q, k, v = torch.stack((q, k, v), dim=3).unbind(3)
    else:  # 2 bytes off: copied, as the launcher does
        q, k, v = (torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape) for t in (q, k, v))
    out, lse, report = emulate(case, problem, q, k, v)
    assert report.clean, report
    check(problem, q, k, v, out=out, lse=lse)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_empty_tensors(sizes: tuple[int, int]) -> None:
    case = Case(*sizes, config(1, 32))
    problem, q, k, v = problem_and_inputs(case)
    out, lse, report = emulate(case, problem, q, k, v)
    assert report.clean
    assert out.shape == q.shape
    assert not out.any()
    assert torch.equal(lse, torch.full((1, 1, sizes[0]), -torch.inf))
