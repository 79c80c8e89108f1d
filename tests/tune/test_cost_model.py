from __future__ import annotations

from dataclasses import replace

import pytest
from helpers_tune import FAMILY

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import ArchError
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.tune.cost_model import LAUNCH_MS, estimate
from flashsmith.runtime.tune.gpus import GPUS, gpu_model
from flashsmith.runtime.tune.request import TuneProblem, usual_shape
from flashsmith.runtime.tune.seeds import diverse, rank_by_model
from flashsmith.runtime.tune.tiles import TileCounter

A100 = ARCHS["sm_80"]


def guess(config=None, *, problem=None, shape=None, arch=A100, gpu=None, registers=None, **changes):
    problem = problem or TuneProblem(head_dim=128)
    shape = shape or usual_shape(4096, head_dim=problem.head_dim)
    spec = problem.traced().spec
    config = replace(config or FAMILY.default_config(spec, arch), **changes)
    return estimate(
        FAMILY, spec, config, arch=arch, gpu=gpu or gpu_model(arch), shape=shape, tiles=TileCounter(problem, shape),
        registers=registers,
    )  # fmt: skip


def test_it_lies_between_the_tensor_cores_peak_and_a_fifth_of_it():
    flop = 4 * 16384 * 4096 * 2048
    tflops = flop / guess().ms / 1e9
    assert 312 / 5 < tflops < 312


def test_twice_the_work_takes_twice_the_time():
    short, long = (guess(shape=usual_shape(n, head_dim=128)) for n in (4096, 8192))
    assert 1.7 < long.ms / short.ms < 2.1


def test_a_causal_mask_halves_the_time_of_long_calls():
    shape = usual_shape(16384, head_dim=128)
    full = guess(shape=shape, schedule="linear")
    causal = guess(problem=TuneProblem(head_dim=128, causal=True), shape=shape)
    assert 0.45 < causal.ms / full.ms < 0.65


def test_longest_first_beats_linear_under_a_causal_mask():
    problem = TuneProblem(head_dim=128, causal=True)
    linear, longest = (guess(problem=problem, schedule=name) for name in ("linear", "longest_first"))
    assert longest.ms < linear.ms


def test_more_registers_cost_residency_and_time():
    lean, fat = guess(registers=128), guess(registers=250)
    assert fat.blocks_per_sm <= lean.blocks_per_sm
    assert fat.ms >= lean.ms


def test_a_config_that_cannot_be_resident_has_no_estimate():
    assert guess(B_c=128, B_r=256, num_warps=8, num_stages=3) is None


def test_a_partial_wave_is_paid_for():
    one_wave = guess(shape=ProblemShape(1, 128 * 108, 4096, 2, 2))
    a_bit_more = guess(shape=ProblemShape(1, 128 * 108, 4096, 3, 3))
    assert a_bit_more.ms > 1.2 * one_wave.ms


def test_memory_bandwidth_is_a_floor():
    shape = ProblemShape(batch=64, seqlen_q=1, seqlen_k=8192, nheads=32, nheads_k=32)
    moved = 2 * 64 * 8192 * 32 * 256
    assert guess(shape=shape).ms >= moved / 2039e6


def test_an_empty_call_costs_a_launch():
    assert guess(shape=ProblemShape(1, 128, 0, 1, 1)).ms == LAUNCH_MS


def test_a_family_without_a_model_has_no_estimate():
    class Other:
        name = "other"

    spec = TuneProblem().traced().spec
    shape = usual_shape(1024, head_dim=128)
    config = FAMILY.default_config(spec, A100)
    assert (
        estimate(
            Other(), spec, config, arch=A100, gpu=gpu_model(A100), shape=shape, tiles=TileCounter(TuneProblem(), shape)
        )
        is None
    )


def test_every_architecture_has_a_gpu_and_a_ranking():
    problem = TuneProblem(head_dim=64, causal=True)
    spec, shape = problem.traced().spec, usual_shape(1024, head_dim=64)
    for arch in ARCHS.values():
        space = FAMILY.space(spec, arch)
        ranked = rank_by_model(
            FAMILY, spec, space, arch=arch, gpu=gpu_model(arch), shape=shape, tiles=TileCounter(problem, shape)
        )
        assert {config for config, _ in ranked} == set(space)
        assert [g.ms for _, g in ranked] == sorted(g.ms for _, g in ranked)


def test_a_gpu_is_found_by_name_and_an_unknown_one_is_an_error():
    assert gpu_model(A100, "NVIDIA A30").sm_count == 56
    with pytest.raises(ArchError, match="A100"):
        gpu_model(A100, "NVIDIA A1000")
    assert all(gpu.arch in ARCHS for gpu in GPUS)


def test_the_leaders_differ_in_more_than_one_choice():
    problem = TuneProblem(head_dim=64)
    spec = problem.traced().spec
    space = FAMILY.space(spec, A100)
    leaders = diverse(space, 8)
    assert len(leaders) == 8
    for one in leaders:
        for other in leaders:
            if one != other:
                mine, theirs = one.to_dict(), other.to_dict()
                assert sum(mine[name] != theirs[name] for name in mine) > 1
    assert diverse(space[:3], 8) == list(space[:3])
