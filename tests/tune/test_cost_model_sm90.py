"""The Hopper forward's cost model: plausible times, and what an H200 measured fastest among the first to be tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import FAMILIES
from flashsmith.generator.families.forward_sm90 import ForwardSm90, ForwardSm90Config
from flashsmith.generator.language.bounds import kv_bounds
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.tune.cost_model import LAUNCH_MS, estimate
from flashsmith.runtime.tune.cost_model_sm90 import tile_cost
from flashsmith.runtime.tune.gpus import gpu_model
from flashsmith.runtime.tune.request import TuneProblem, usual_shape
from flashsmith.runtime.tune.seeds import rank_by_model, seeds_for, space_at
from flashsmith.runtime.tune.tiles import TileCounter

FAMILY = FAMILIES["forward_sm90"]
SM90 = ARCHS["sm_90"]
GPU = gpu_model(SM90)
PEAK_TFLOPS = 4096 * GPU.sm_count * GPU.clock_ghz / 1e3


FIELDS = ("num_warpgroups", "B_c", "num_stages", "q_stages", "softmax", "pingpong", "schedule")
DEFAULT = ForwardSm90().default_configs(TuneProblem(head_dim=64).traced().spec, SM90)[0]


def config(*values) -> ForwardSm90Config:
    return replace(DEFAULT, **dict(zip(FIELDS, values, strict=True)))


def guess(the_config=None, *, head_dim=128, causal=False, seqlen=4096, shape=None, softcap=0.0, **changes):
    problem = TuneProblem(head_dim=head_dim, causal=causal, softcap=softcap)
    spec = problem.traced().spec
    shape = shape or usual_shape(seqlen, head_dim=head_dim)
    the_config = replace(the_config or FAMILY.default_config(spec, SM90), **changes)
    found = estimate(FAMILY, spec, the_config, arch=SM90, gpu=GPU, shape=shape, tiles=TileCounter(problem, shape))
    assert found is not None
    return found


def known(*values, causal: bool) -> ForwardSm90Config:
    return config(*values, "dynamic" if causal else "static")


D64_SHORT, D64_LONG = (4, 64, 3, 2, "wary", True), (3, 128, 3, 2, "wary", True)
D128, D128_SHORT, D128_THREE = (
    (2, 128, 2, 2, "optimistic", True),
    (2, 64, 3, 2, "optimistic", True),
    (3, 64, 2, 2, "optimistic", True),
)
D256, D256_TURNS = (2, 64, 2, 1, "optimistic", False), (2, 64, 2, 1, "optimistic", True)

#: (head_dim, causal, seqlen) -> what an H200 measured fastest there, and what was less than 1 % behind
#: (measured/h200-forward-sm90.json, the present kernel).
KNOWN = {
    (64, False, 512): (D64_SHORT,),
    (64, False, 1024): (D64_SHORT,),
    (64, False, 4096): (D64_LONG,),
    (64, False, 16384): (D64_LONG,),
    (64, True, 512): (D64_SHORT,),
    (64, True, 1024): (D64_SHORT,),
    (64, True, 4096): (D64_SHORT, D64_LONG),
    (64, True, 16384): (D64_LONG,),
    (128, False, 512): (D128,),
    (128, False, 1024): (D128,),
    (128, False, 4096): (D128,),
    (128, False, 16384): (D128,),
    (128, True, 512): (D128,),
    (128, True, 1024): (D128_SHORT, D128),
    (128, True, 4096): (D128_THREE, D128),
    (128, True, 16384): (D128, D128_THREE),
    (256, False, 512): (D256_TURNS, D256),
    (256, False, 1024): (D256_TURNS, D256),
    (256, False, 4096): (D256, D256_TURNS),
    (256, False, 16384): (D256_TURNS, D256),
    (256, True, 512): (D256, D256_TURNS),
    (256, True, 1024): (D256_TURNS, D256),
    (256, True, 4096): (D256, D256_TURNS),
    (256, True, 16384): (D256_TURNS, D256),
}


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_what_is_known_to_be_fast_is_tried_among_the_first_four_or_close_to_the_best(case):
    head_dim, causal, seqlen = case
    fast = [known(*values, causal=causal) for values in KNOWN[case]]
    problem, shape = TuneProblem(head_dim=head_dim, causal=causal), usual_shape(seqlen, head_dim=head_dim)
    spec = problem.traced().spec
    space = space_at(FAMILY, spec, FAMILY.space(spec, SM90), shape)
    ranked = rank_by_model(FAMILY, spec, space, arch=SM90, gpu=GPU, shape=shape, tiles=TileCounter(problem, shape))
    assert {one for one, _ in ranked} == set(space)
    # What was measured kept P_ij in registers: see `test_p_in_shared_memory_costs_what_was_measured` for the others.
    space = tuple(one for one in space if one.p_operand == "registers")
    ranked = [(one, guess) for one, guess in ranked if one.p_operand == "registers"]
    times = {one: guess.ms / ranked[0][1].ms for one, guess in ranked}
    assert all(times[one] < 1.05 for one in fast)
    seeds = seeds_for(
        default=FAMILY.default_config(spec, SM90),
        stored=(),
        earlier=(),
        ranked=list(times),
        space=space,
        seed=0,
    )
    assert any(one in seeds[:4] for one in fast) or times[fast[0]] < 1.02


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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [512, 4096, 16384])
def test_drawing_tiles_beats_a_fixed_order_and_a_block_a_tile_under_a_mask(head_dim, seqlen):
    ms = {
        name: guess(head_dim=head_dim, causal=True, seqlen=seqlen, q_stages=1, schedule=name).ms
        for name in ("grid", "static", "dynamic")
    }
    assert ms["dynamic"] < ms["static"] and ms["dynamic"] < ms["grid"]


def test_small_tiles_of_keys_waste_less_under_a_mask_the_shorter_the_call():
    ratio = {
        n: guess(config(*D128_SHORT, "dynamic"), causal=True, seqlen=n).ms
        / guess(config(*D128, "dynamic"), causal=True, seqlen=n).ms
        for n in (512, 1024, 16384)
    }
    assert ratio[512] < ratio[1024] < 1 < ratio[16384]


def test_a_warpgroup_skips_what_its_own_rows_do_not_see_where_bounds_are_exact(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(TileCounter, "own_share", lambda self, *sizes: asked.append(sizes) or 0.75)
    four = config(4, 64, 3, 2, "wary", True, "dynamic")
    skips = guess(four, head_dim=64, causal=True).ms
    assert asked == [(256, 64, 64)]
    monkeypatch.setattr(TileCounter, "own_share", lambda self, *sizes: 1.0)
    assert 0.76 < skips / guess(four, head_dim=64, causal=True).ms < 0.9
    asked.clear()
    (tmp_path / "mods.py").write_text("def holes(b, h, q_idx, kv_idx):\n    return kv_idx % 3 < 2\n")
    problem, shape = TuneProblem(head_dim=64, mask_mod=f"{tmp_path}/mods.py:holes"), usual_shape(1024, head_dim=64)
    monkeypatch.setattr(TileCounter, "own_share", lambda self, *sizes: asked.append(sizes) or 0.75)
    spec = problem.traced(nheads=shape.nheads).spec
    estimate(FAMILY, spec, four, arch=SM90, gpu=GPU, shape=shape, tiles=TileCounter(problem, shape))
    guess(four, head_dim=64)
    assert not kv_bounds(spec.mask).exact and not asked


def test_a_second_buffer_of_q_hides_a_prologue_in_short_calls():
    assert guess(seqlen=512, q_stages=2).ms < guess(seqlen=512, q_stages=1).ms
    gain = {n: guess(seqlen=n, q_stages=1).ms / guess(seqlen=n, q_stages=2).ms for n in (512, 16384)}
    assert gain[512] > gain[16384]


def test_turns_pay_the_more_the_longer_softmax_takes_beside_products():
    gain = {d: guess(head_dim=d, pingpong=False).ms / guess(head_dim=d, pingpong=True).ms for d in (64, 128, 256)}
    assert gain[64] > gain[128] > gain[256] > 1
    assert gain[256] < 1.02


def test_exact_softmax_and_a_score_function_cost_time():
    assert guess(head_dim=64, softmax="exact").ms > guess(head_dim=64).ms
    assert guess(head_dim=64, softcap=30.0).ms > guess(head_dim=64).ms


def test_a_wary_softmax_costs_time_where_two_warpgroups_wait_for_it_alone():
    """As measured: up to 13 % at head dim 128 with two warpgroups, nothing with four at head dim 64."""
    two, four = config(*D128_SHORT, "static"), config(*D64_SHORT, "static")
    ratio = guess(two, softmax="wary").ms / guess(two, softmax="optimistic").ms
    assert 1.03 < ratio < 1.15
    ratio = guess(four, head_dim=64, softmax="wary").ms / guess(four, head_dim=64, softmax="optimistic").ms
    assert 0.98 < ratio < 1


def test_one_warpgroup_bounds_a_block_of_two_at_small_head_dims():
    two = config(2, 128, 2, 2, "optimistic", False, "static")
    assert guess(two, head_dim=64).bound_by == "one warpgroup"
    assert guess(config(4, 48, 2, 2, "optimistic", False, "static"), head_dim=96).bound_by == "shared memory"


def test_a_third_buffer_of_keys_pays_and_a_fourth_does_not():
    ms = {n: guess(config(*D64_SHORT, "static"), head_dim=64, num_stages=n).ms for n in (2, 3, 4)}
    assert ms[3] < ms[4] < ms[2]


def test_a_partial_wave_is_paid_for():
    one_wave = guess(shape=ProblemShape(1, 128 * 132, 4096, 2, 2))
    a_bit_more = guess(shape=ProblemShape(1, 128 * 132, 4096, 3, 3))
    assert a_bit_more.ms == pytest.approx(1.5 * one_wave.ms, rel=0.02)
    assert guess(shape=ProblemShape(1, 128 * 133, 4096, 2, 2)).ms > 1.4 * one_wave.ms


def test_each_block_has_an_sm_to_itself():
    for num_warpgroups, B_c in ((1, 128), (2, 128), (3, 96), (4, 64)):
        found = guess(config(num_warpgroups, B_c, 2, 2, "optimistic", False, "static"), head_dim=64)
        assert found.blocks_per_sm == 1 and 96 <= found.registers <= 168


def test_empty_calls_cost_a_launch_and_memory_is_a_floor():
    assert guess(shape=ProblemShape(1, 128, 0, 1, 1)).ms == LAUNCH_MS
    shape = ProblemShape(batch=64, seqlen_q=1, seqlen_k=8192, nheads=32, nheads_k=32)
    assert guess(shape=shape).ms >= 2 * 64 * 8192 * 32 * 256 / (GPU.memory_gbps * 1e6)


def test_a_tile_reads_what_the_products_read():
    spec = TuneProblem(head_dim=128).traced().spec
    cost = tile_cost(spec, config(2, 96, 2, 2, "exact", False, "static"))
    assert cost.smem_bytes == 2 * 2 * (64 * 128 + 96 * 256)


def test_p_in_shared_memory_is_written_and_read():
    spec = TuneProblem(head_dim=128).traced().spec
    one = replace(FAMILY.default_config(spec, SM90), B_c=96)
    cost, shared = tile_cost(spec, one), tile_cost(spec, replace(one, p_operand="shared"))
    assert shared.smem_bytes == cost.smem_bytes + 2 * 2 * 2 * 64 * 96
    assert shared.cycles >= cost.cycles


@pytest.mark.xfail(strict=True, reason="The model knows of P_ij in shared memory what the pipes do, not the waits.")
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 16384])
def test_p_in_shared_memory_costs_what_was_measured(seqlen):
    """An H200 took 6 to 7 % longer with this config's P_ij in shared memory; of five lengths, 4096 alone 1 % less."""
    one = config(3, 128, 3, 2, "optimistic", True, "static")
    ratio = guess(one, head_dim=64, seqlen=seqlen, p_operand="shared").ms / guess(one, head_dim=64, seqlen=seqlen).ms
    assert 1.03 < ratio < 1.1


def test_packed_heads_share_the_loads_of_their_keys():
    shape = ProblemShape(batch=64, seqlen_q=4, seqlen_k=8192, nheads=32, nheads_k=4)
    alone, packed = guess(shape=shape), guess(shape=shape, pack_gqa=True)
    assert packed.waves == pytest.approx(alone.waves / 8)  # 4 queries of 8 heads are one tile
    assert packed.ms < 0.25 * alone.ms
    # Long calls compute as much either way.
    long = ProblemShape(batch=1, seqlen_q=8192, seqlen_k=8192, nheads=32, nheads_k=4)
    assert guess(shape=long, pack_gqa=True).ms == pytest.approx(guess(shape=long).ms, rel=0.02)


def test_a_group_that_cannot_be_packed_has_no_estimate():
    problem, shape = TuneProblem(), ProblemShape(1, 64, 64, 3, 1)
    spec = problem.traced().spec
    packed = replace(FAMILY.default_config(spec, SM90), pack_gqa=True)
    tiles = TileCounter(problem, shape)
    assert estimate(FAMILY, spec, packed, arch=SM90, gpu=GPU, shape=shape, tiles=tiles) is None
