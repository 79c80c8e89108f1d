from __future__ import annotations

from dataclasses import replace

import pytest
from helpers_campaign import HOPPER
from helpers_tune import ARCH

from flashsmith.generator.families import FAMILIES
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.tune.gpus import gpu_model
from flashsmith.runtime.tune.reasons import facts_of, why
from flashsmith.runtime.tune.request import TuneProblem
from flashsmith.runtime.tune.tiles import TileCounter

SHAPE = ProblemShape(1, 1024, 1024, 16, 16)


def facts(config, *, causal=False, shape=SHAPE, family=HOPPER):
    problem = TuneProblem(head_dim=128, causal=causal)
    spec = problem.traced().spec
    tiles = TileCounter(problem, shape)
    return facts_of(family, spec, config, arch=ARCH, gpu=gpu_model(ARCH), shape=shape, tiles=tiles)


def config(num_warpgroups=2, B_c=128, schedule="static"):
    return HOPPER.config_type(num_warpgroups, B_c, 2, 1, "optimistic", False, schedule, "registers", False)


def test_waves_and_idle_time_are_counted():
    found = facts(config())
    assert (found.tiles, found.B_r, found.B_c) == (128, 128, 128)
    assert found.waves == pytest.approx(128 / 132)
    assert found.idle == pytest.approx(4 / 132)
    assert found.visited == 8 and found.surplus == 0
    assert not facts(config(schedule="grid")).persistent
    assert facts(config(), shape=replace(SHAPE, batch=2)).persistent


def test_a_mask_shows_as_tiles_left_out_and_scores_beyond_the_visible():
    found = facts(config(), causal=True)
    assert found.visited == 4.5
    assert found.idle is None and "in 1.0 waves, 4.5 tiles of 128 keys each" in str(found)
    assert found.surplus == pytest.approx(4.5 / 8 / 0.5 - 1)
    assert facts(config(1, B_c=64), causal=True).surplus == pytest.approx(found.surplus / 2)


def test_short_calls_are_prologue_to_a_larger_part():
    short, long = (facts(config(), shape=ProblemShape(1, n, n, 16, 16)) for n in (512, 16384))
    assert short.prologue / long.prologue > 5


def test_the_words_say_what_differs_and_by_how_much():
    one, other = facts(config(2)), facts(config(3))
    words = why(one, other, ahead=0.018, default="runner-up")
    assert "128 tiles of 128 rows in 1.0 waves (3 % idle)" in words
    assert "1.8 % ahead of the runner-up, the default, which has more idle time in its waves" in words
    assert "96 tiles of rows" in words
    assert why(one, one, ahead=-0.002, default="5.0 %").endswith(
        "0.2 % behind the runner-up, which has the same tiles. 5.0 % ahead of the default."
    )
    assert why(one, None, ahead=None, default="winner").endswith("prologue. It is the default.")


def test_other_families_and_empty_calls_have_facts_as_far_as_they_go():
    family = FAMILIES["forward_sm80"]
    spec = TuneProblem(head_dim=128).traced().spec
    found = facts(family.default_config(spec, ARCH), family=family)
    assert found.prologue is None and "prologue" not in str(found)
    assert facts(config(), shape=ProblemShape(1, 0, 1024, 16, 16)) is None
    assert why(None, None, ahead=None, default="") == ""
