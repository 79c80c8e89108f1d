"""The Hopper forward's cost model: plausible times, and what an H200 measured fastest among the first to be tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import FAMILIES
from flashsmith.generator.families.forward_sm90 import ForwardSm90Config
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.tune.cost_model import LAUNCH_MS, estimate
from flashsmith.runtime.tune.cost_model_sm90 import tile_cost
from flashsmith.runtime.tune.gpus import gpu_model
from flashsmith.runtime.tune.request import TuneProblem, usual_shape
from flashsmith.runtime.tune.seeds import rank_by_model, seeds_for
from flashsmith.runtime.tune.tiles import TileCounter

FAMILY = FAMILIES["forward_sm90"]
SM90 = ARCHS["sm_90"]
GPU = gpu_model(SM90)
PEAK_TFLOPS = 4096 * GPU.sm_count * GPU.clock_ghz / 1e3


def config(*values) -> ForwardSm90Config:
    return ForwardSm90Config(*values)


def guess(the_config=None, *, head_dim=128, causal=False, seqlen=4096, shape=None, softcap=0.0, **changes):
    problem = TuneProblem(head_dim=head_dim, causal=causal, softcap=softcap)
    spec = problem.traced().spec
    shape = shape or usual_shape(seqlen, head_dim=head_dim)
    the_config = replace(the_config or FAMILY.default_config(spec, SM90), **changes)
    found = estimate(FAMILY, spec, the_config, arch=SM90, gpu=GPU, shape=shape, tiles=TileCounter(problem, shape))
    assert found is not None
    return found


#: (head_dim, causal, seqlen) -> what an H200 measured fastest there.
KNOWN = {
    (128, False, 16384): config(2, 128, 2, 2, "optimistic", False, "static", "registers", False),
    (128, False, 4096): config(2, 128, 2, 2, "optimistic", False, "static", "registers", False),
    (128, True, 16384): config(2, 128, 2, 2, "optimistic", False, "dynamic", "registers", False),
    (128, True, 4096): config(2, 128, 2, 2, "optimistic", False, "dynamic", "registers", False),
    (64, False, 16384): config(3, 128, 2, 2, "optimistic", True, "static", "registers", False),
    (64, True, 16384): config(3, 128, 2, 2, "optimistic", True, "dynamic", "registers", False),
    (64, False, 1024): config(4, 64, 2, 2, "optimistic", True, "static", "registers", False),
    (64, False, 512): config(4, 64, 2, 2, "optimistic", True, "static", "registers", False),
    (64, True, 1024): config(4, 64, 2, 2, "optimistic", True, "dynamic", "registers", False),
    (256, False, 16384): config(2, 80, 2, 1, "optimistic", False, "static", "registers", False),
    (256, True, 4096): config(2, 80, 2, 1, "optimistic", False, "grid", "registers", False),
}


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_what_is_known_to_be_fast_is_tried_among_the_first_four(case):
    head_dim, causal, seqlen = case
    problem, shape = TuneProblem(head_dim=head_dim, causal=causal), usual_shape(seqlen, head_dim=head_dim)
    spec = problem.traced().spec
    space = FAMILY.space(spec, SM90)
    ranked = rank_by_model(FAMILY, spec, space, arch=SM90, gpu=GPU, shape=shape, tiles=TileCounter(problem, shape))
    assert {one for one, _ in ranked} == {one for one in space if not one.pack_gqa}
    times = dict(ranked)
    assert times[KNOWN[case]].ms <= 1.01 * ranked[0][1].ms
    seeds = seeds_for(
        default=FAMILY.default_config(spec, SM90),
        stored=(),
        earlier=(),
        ranked=[one for one, _ in ranked],
        space=space,
        seed=0,
    )
    assert KNOWN[case] in seeds[:4]


@pytest.mark.parametrize(("head_dim", "share"), [(64, 0.6), (128, 0.75), (256, 0.8)])
def test_long_calls_reach_a_plausible_part_of_the_peak(head_dim, share):
    shape = usual_shape(16384, head_dim=head_dim)
    flop = 4 * shape.batch * shape.nheads * 16384**2 * head_dim
    tflops = flop / guess(head_dim=head_dim, seqlen=16384).ms / 1e9
    assert share * PEAK_TFLOPS < tflops < 0.98 * PEAK_TFLOPS


def test_softmax_bounds_small_head_dims_and_products_large_ones():
    assert guess(head_dim=64).bound_by == "softmax"
    assert guess(head_dim=256).bound_by == "tensor cores"


def test_twice_the_work_takes_twice_the_time():
    assert 1.8 < guess(seqlen=8192).ms / guess(seqlen=4096).ms < 2.1


def test_a_causal_mask_halves_the_time_of_long_calls():
    assert 0.45 < guess(causal=True, seqlen=16384).ms / guess(seqlen=16384).ms < 0.6


def test_drawing_tiles_beats_a_fixed_order_under_a_mask_but_not_at_wide_head_dims():
    assert guess(causal=True, schedule="dynamic").ms < guess(causal=True, schedule="static").ms
    wide = {name: guess(head_dim=256, causal=True, schedule=name).ms for name in ("grid", "dynamic")}
    assert wide["grid"] < wide["dynamic"]


def test_a_second_buffer_of_q_hides_a_prologue_in_short_calls():
    assert guess(seqlen=512, q_stages=2).ms < guess(seqlen=512, q_stages=1).ms
    gain = {n: guess(seqlen=n, q_stages=1).ms / guess(seqlen=n, q_stages=2).ms for n in (512, 16384)}
    assert gain[512] > gain[16384]


def test_turns_pay_where_softmax_takes_as_long_as_products():
    assert guess(head_dim=64, pingpong=True).ms < guess(head_dim=64, pingpong=False).ms
    assert guess(head_dim=128, pingpong=False).ms < guess(head_dim=128, pingpong=True).ms


def test_exact_softmax_and_a_score_function_cost_time():
    assert guess(head_dim=64, softmax="exact").ms > guess(head_dim=64).ms
    assert guess(head_dim=64, softcap=30.0).ms > guess(head_dim=64).ms


def test_a_partial_wave_is_paid_for():
    one_wave = guess(shape=ProblemShape(1, 128 * 132, 4096, 2, 2))
    a_bit_more = guess(shape=ProblemShape(1, 128 * 132, 4096, 3, 3))
    assert a_bit_more.ms == pytest.approx(1.5 * one_wave.ms, rel=0.02)
    assert guess(shape=ProblemShape(1, 128 * 133, 4096, 2, 2)).ms > 1.4 * one_wave.ms


def test_each_block_has_an_sm_to_itself():
    for num_warpgroups, B_c in ((1, 128), (2, 128), (3, 96), (4, 64)):
        found = guess(config(num_warpgroups, B_c, 2, 2, "optimistic", False, "static", "registers", False), head_dim=64)
        assert found.blocks_per_sm == 1 and 96 <= found.registers <= 168


def test_empty_calls_cost_a_launch_and_memory_is_a_floor():
    assert guess(shape=ProblemShape(1, 128, 0, 1, 1)).ms == LAUNCH_MS
    shape = ProblemShape(batch=64, seqlen_q=1, seqlen_k=8192, nheads=32, nheads_k=32)
    assert guess(shape=shape).ms >= 2 * 64 * 8192 * 32 * 256 / (GPU.memory_gbps * 1e6)


def test_a_tile_reads_what_the_products_read():
    spec = TuneProblem(head_dim=128).traced().spec
    cost = tile_cost(spec, config(2, 96, 2, 2, "exact", False, "static", "registers", False))
    assert cost.smem_bytes == 2 * 2 * (64 * 128 + 96 * 256)
    shared = tile_cost(spec, config(2, 96, 2, 2, "exact", False, "static", "shared", False))
    assert shared.smem_bytes == cost.smem_bytes + 2 * 2 * 2 * 64 * 96  # P_ij, written and read
    assert shared.cycles >= cost.cycles


def test_p_in_shared_memory_costs_nothing_that_a_larger_tile_does_not_bring_back():
    same, larger = (config(3, B_c, 2, 2, "optimistic", True, "static", "shared", False) for B_c in (128, 176))
    assert guess(larger, head_dim=64, seqlen=16384).ms < guess(same, head_dim=64, seqlen=16384).ms
    assert guess(replace(same, p_operand="registers", False), head_dim=64).ms <= guess(same, head_dim=64).ms


def test_packed_heads_share_the_loads_of_their_keys():
    shape = ProblemShape(batch=64, seqlen_q=4, seqlen_k=8192, nheads=32, nheads_k=4)
    of = config(1, 128, 2, 1, "optimistic", False, "static", "registers", False)
    alone, packed = guess(of, shape=shape), guess(of, shape=shape, pack_gqa=True)
    assert packed.waves == pytest.approx(alone.waves / 8)  # 4 queries of 8 heads are one tile
    assert packed.ms < 0.25 * alone.ms  # then memory bounds it
    # Long calls compute as much either way.
    long = ProblemShape(batch=1, seqlen_q=8192, seqlen_k=8192, nheads=32, nheads_k=4)
    assert guess(of, shape=long, pack_gqa=True).ms == pytest.approx(guess(of, shape=long).ms, rel=0.02)


def test_a_group_that_cannot_be_packed_has_no_estimate():
    problem, shape = TuneProblem(), ProblemShape(1, 64, 64, 3, 1)
    spec = problem.traced().spec
    of = config(2, 128, 2, 1, "optimistic", False, "static", "registers", True)
    tiles = TileCounter(problem, shape)
    assert estimate(FAMILY, spec, of, arch=SM90, gpu=GPU, shape=shape, tiles=tiles) is None
