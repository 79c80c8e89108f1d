from __future__ import annotations

import pytest
from helpers_campaign import HOPPER, request_of
from helpers_tune import ARCH

from flashsmith.generator.spec import AttentionSpec, ProblemShape
from flashsmith.runtime.store_schema import SpecClass
from flashsmith.runtime.tune.campaign_plan import explored_shapes, plan_of
from flashsmith.runtime.tune.gpus import gpu_model
from flashsmith.runtime.tune.neighbours import Winner, carried_over, class_distance, nearest_winners

CAUSAL = request_of(64, causal=True).problem.traced().spec.mask


def config(B_c):
    return HOPPER.config_type(1, B_c, 2, 1, "exact", False, "grid", "registers", False)


def at(length, ratio=1):
    return ProblemShape(2, length, length, 16, 16 // ratio)


def key(head_dim, mask=None, **more):
    return SpecClass.of(AttentionSpec(head_dim=head_dim, mask=mask, **more))


def test_an_octave_of_the_head_dim_is_farther_than_a_mask():
    here = key(64)
    near = [key(64), key(64, dtype="fp16"), key(72), key(64, CAUSAL), key(128), key(256)]
    distances = [class_distance(here, other) for other in near]
    assert distances == sorted(distances) and len(set(distances)) == len(distances)


def test_winners_of_near_specs_come_first_and_invalid_ones_never():
    winners = [
        Winner(key(256), at(4096), config(48)),
        Winner(key(64), at(16384), config(64)),
        Winner(key(64), at(512), config(80)),
        Winner(key(64), at(4096), config(192)),  # too many registers at head dim 256
    ]
    found = nearest_winners(winners, AttentionSpec(head_dim=64), [at(512)], family=HOPPER, arch=ARCH, count=3)
    assert found == [config(80), config(192), config(64)]
    found = nearest_winners(winners, AttentionSpec(head_dim=256), [at(512)], family=HOPPER, arch=ARCH, count=4)
    assert config(192) not in found and found[0] == config(48)


def test_times_are_carried_over_from_the_nearest_size_by_the_model():
    times = {at(512): {config(64): 1.0, config(128): 1.1}, at(16384): {config(64): 9.0, config(128): 8.0}}

    def model(one, shape):
        return 2.0 if (one, shape) == (config(64), at(1024)) else 1.0

    assert carried_over(times, at(1024), model) == [config(128), config(64)]
    assert carried_over(times, at(1024), lambda one, shape: None) == [config(64), config(128)]
    assert carried_over(times, at(8192), model)[0] == config(128)
    assert carried_over({}, at(8192), model) == []


@pytest.mark.parametrize(
    ("lengths", "explored"),
    [
        ([512, 1024, 2048, 4096, 8192, 16384, 32768], [1024, 16384]),
        ([512, 2048, 8192], [512, 8192]),
        ([4096, 1024], [1024, 4096]),
        ([4096], [4096]),
    ],
)
def test_a_short_and_a_long_length_of_the_first_ratio_are_explored(lengths, explored):
    shapes = [at(length, ratio) for ratio in (4, 1) for length in lengths]
    assert explored_shapes(shapes) == tuple(at(length, 4) for length in explored)


def test_seeds_are_valid_distinct_and_from_the_model_at_both_sizes():
    plan = plan_of(request_of(128, causal=True, lengths=(512, 16384)), place=0, explore=24)
    seeds = plan.find_seeds(gpu_model(ARCH), None)
    assert len(set(seeds)) == len(seeds) >= 12
    assert set(seeds) <= set(plan.space)
