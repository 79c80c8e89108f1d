"""The Hopper forward: its space and the reasons for what is not in it, resources, geometry, layouts, defaults."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from flashsmith.generator import mods
from flashsmith.generator.arch import ARCHS, REGISTERS_PER_SM
from flashsmith.generator.errors import ConfigError, UnsupportedError
from flashsmith.generator.families import choose_family, families_for, family_named
from flashsmith.generator.families.base import layout_of
from flashsmith.generator.families.forward_sm90 import (
    AMPLE_REGISTERS,
    P_OPERANDS,
    P_REGISTERS,
    REGISTERS,
    ForwardSm90,
    ForwardSm90Config,
    tile_bytes,
)
from flashsmith.generator.language import and_masks, compose_scores, trace_mask, trace_score
from flashsmith.generator.spec import AttentionSpec, ProblemShape

FAMILY = ForwardSm90()
SM90 = ARCHS["sm_90"]


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 2 == 0) & (kv_idx <= q_idx)


CAUSAL = trace_mask(mods.causal)
#: name -> (mask, score), as every family has to take them.
MODS = {
    "none": (None, None),
    "causal": (CAUSAL.graph, None),
    "window": (and_masks(CAUSAL, trace_mask(mods.sliding_window(128, -1))).graph, None),
    "general": (trace_mask(dilated).graph, None),
    "softcap+alibi": (
        CAUSAL.graph,
        compose_scores(trace_score(mods.softcap(30.0)), trace_score(mods.alibi(np.ones(4, np.float32)))).graph,
    ),
}


def config(**changes: object) -> ForwardSm90Config:
    values = {
        "num_warpgroups": 2,
        "B_c": 128,
        "num_stages": 2,
        "q_stages": 2,
        "softmax": "optimistic",
        "pingpong": False,
        "schedule": "static",
        "p_operand": "registers",
        "pack_gqa": False,
    }
    return ForwardSm90Config.from_dict(values | changes)


def spec_of(head_dim: int, head_dim_v: int = 0, name: str = "none") -> AttentionSpec:
    mask, score = MODS[name]
    return AttentionSpec(head_dim=head_dim, head_dim_v=head_dim_v or head_dim, mask=mask, score=score)


# ---- Defaults and space ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("name", MODS)
def test_every_default_is_inside_the_space(name: str, head_dim: int) -> None:
    for head_dim_v in {head_dim, 8, 128, 256}:
        spec = spec_of(head_dim, head_dim_v, name)
        defaults = FAMILY.default_configs(spec, SM90)
        assert len(defaults) == len(set(defaults)) >= 2  # where a mask's registers make one spill there is another
        for default in defaults:
            FAMILY.check(spec, default, SM90)
        # Each later one leaves more registers free, or has none of the work that makes the earlier one spill.
        needs = [FAMILY.resources(spec, default) for default in defaults]
        free = [(n.register_cap - n.registers, d.softmax == "exact") for n, d in zip(needs, defaults, strict=True)]
        assert free == sorted(free)


@pytest.mark.parametrize(
    ("dims", "name", "expected"),
    [
        (128, "none", config(pingpong=True)),
        (128, "causal", config(pingpong=True, schedule="dynamic")),
        (64, "none", config(num_warpgroups=4, B_c=64, num_stages=3, softmax="wary", pingpong=True)),
        (96, "causal", config(num_warpgroups=3, B_c=64, num_stages=3, pingpong=True, schedule="dynamic")),
        (192, "none", config(B_c=96, q_stages=1, pingpong=True)),
        (256, "causal", config(B_c=64, q_stages=1, schedule="dynamic")),
    ],
)
def test_the_defaults_are_what_an_h200_measured_fastest(dims: int, name: str, expected: ForwardSm90Config) -> None:
    assert FAMILY.default_config(spec_of(dims, name=name), SM90) == expected


@pytest.mark.parametrize("name", ["none", "causal"])
def test_the_space_is_the_candidates_without_an_exclusion_in_their_order(name: str) -> None:
    spec = spec_of(64, name=name)
    once = list(FAMILY.candidates(spec, SM90))
    assert once == list(FAMILY.candidates(spec, SM90)) and len(set(once)) == len(once)
    space = FAMILY.space(spec, SM90)
    assert space == tuple(c for c in once if FAMILY.exclusion(spec, c, SM90) is None)
    # The config that wins long calls at head dim 64 is in it, though it is no default.
    schedule = "static" if name == "none" else "dynamic"
    assert config(num_warpgroups=3, num_stages=3, pingpong=True, schedule=schedule) in space


def test_every_exclusion_names_its_values_and_a_remedy() -> None:
    kinds = Counter[str]()
    for dims, name in itertools.product((64, 128, 256), ("none", "causal")):
        spec = spec_of(dims, name=name)
        for candidate in FAMILY.candidates(spec, SM90):
            excluded = FAMILY.exclusion(spec, candidate, SM90)
            if excluded is None:
                continue
            kinds[excluded.kind] += 1
            assert any(verb in excluded.reason for verb in ("Lower", "Use"))
            with pytest.raises(ConfigError, match=r"\."):
                FAMILY.check(spec, candidate, SM90)
    assert set(kinds) == {"shared memory", "registers", "pingpong", "q_stages", "schedule"}


@pytest.mark.parametrize(
    ("dims", "name", "changes", "kind", "words"),
    [
        (256, "none", {}, "shared memory", "need 393440 bytes of shared memory; sm_90 allows 232448"),
        (256, "none", {"B_c": 112, "q_stages": 1, "num_stages": 2}, "shared memory", "B_c=112, num_stages=2"),
        (128, "none", {"num_warpgroups": 3, "B_c": 128, "q_stages": 1}, "registers", "leaves a consumer 160"),
        (64, "none", {"num_warpgroups": 4, "B_c": 96}, "registers", "leaves a consumer 112"),
        (128, "none", {"num_warpgroups": 3, "B_c": 128, "q_stages": 1}, "registers", "or use p_operand=shared"),
        (
            64,
            "none",
            {"num_warpgroups": 4, "B_c": 112, "p_operand": "shared"},
            "registers",
            "Lower B_c or num_warpgroups.",
        ),
        (128, "none", {"num_warpgroups": 3, "B_c": 96, "p_operand": "shared"}, "shared memory", "p_operand=registers"),
        (64, "none", {"num_warpgroups": 1, "pingpong": True}, "pingpong", "two warpgroups"),
        (64, "none", {"schedule": "grid"}, "q_stages", "Use q_stages=1"),
        (64, "none", {"schedule": "dynamic"}, "schedule", "Use schedule=static"),
    ],
)
def test_each_reason(dims: int, name: str, changes: dict[str, object], kind: str, words: str) -> None:
    excluded = FAMILY.exclusion(spec_of(dims, name=name), config(**changes), SM90)
    assert excluded is not None and excluded.kind == kind and words in excluded.reason


@pytest.mark.parametrize("dims", [64, 96, 128, 192, 256])
def test_p_in_shared_memory_is_proposed_where_registers_are_short(dims: int) -> None:
    spec = spec_of(dims)
    space = FAMILY.space(spec, SM90)
    shared = [c for c in space if c.p_operand == "shared"]
    for one in shared:
        other = FAMILY.resources(spec, replace(one, p_operand="registers"))
        assert other.registers + AMPLE_REGISTERS > other.register_cap
    assert len(shared) < 0.3 * (len(space) - len(shared))
    widest = {w: max((c.B_c for c in shared if c.num_warpgroups == w), default=0) for w in (3, 4)}
    assert widest == {64: {3: 192, 4: 96}, 96: {3: 128, 4: 64}, 128: {3: 128, 4: 0}, 192: {3: 64, 4: 0}}.get(
        dims, {3: 0, 4: 0}
    )


def test_a_mask_allows_the_dynamic_schedule() -> None:
    assert FAMILY.exclusion(spec_of(64, name="causal"), config(schedule="dynamic"), SM90) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_warpgroups": 0}, "num_warpgroups must be from 1 to 4, but got 0"),
        ({"num_warpgroups": 5}, "num_warpgroups must be from 1 to 4, but got 5"),
        ({"B_c": 72}, "B_c must be a multiple of 16 from 16 to 256, but got 72"),
        ({"B_c": 272}, "B_c must be a multiple of 16 from 16 to 256"),
        ({"num_stages": 1}, "num_stages must be at least 2"),
        ({"q_stages": 3}, "q_stages must be 1 or 2"),
        ({"softmax": "approximate"}, "softmax must be one of exact, optimistic"),
        ({"schedule": "longest_first"}, "schedule must be one of grid, static, dynamic"),
        ({"p_operand": "smem"}, "p_operand must be one of registers, shared, but got 'smem'"),
        ({"pingpong": 1}, "pingpong of a forward_sm90 config must be bool"),
        ({"num_warps": 4}, "unknown or missing: num_warps"),
    ],
)
def test_illegal_configs_say_rule_and_value(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_a_config_round_trips() -> None:
    original = config(schedule="dynamic")
    assert ForwardSm90Config.from_dict(original.to_dict()) == original
    assert str(original).startswith("num_warpgroups=2 B_c=128 num_stages=2 q_stages=2")
    assert (original.B_r, original.threads) == (128, 384)


# ---- Resources and launch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "chunks", "nbytes"), [(64, 8, 8192), (64, 2, 8192), (64, 10, 16384), (48, 16, 12288), (80, 32, 40960)]
)
def test_a_tile_is_whole_parts_of_64_columns(rows: int, chunks: int, nbytes: int) -> None:
    assert tile_bytes(rows, chunks) == nbytes


@pytest.mark.parametrize(
    ("schedule", "softmax"), [("static", "optimistic"), ("dynamic", "wary"), ("dynamic", "exact"), ("grid", "exact")]
)
@pytest.mark.parametrize(("dims", "columns"), [((128, 128), (128, 128)), ((72, 40), (128, 64)), ((40, 72), (64, 128))])
def test_shared_memory_is_q_twice_every_stage_and_the_barriers(
    dims: tuple[int, int], columns: tuple[int, int], schedule: str, softmax: str
) -> None:
    """Q_i, or the O_i that is staged in its place if that is wider; K_j and V_j a stage; 8 bytes a barrier."""
    one = config(B_c=96, num_stages=3, schedule=schedule, softmax=softmax)
    need = FAMILY.resources(spec_of(*dims, name="causal"), one)
    q_bytes = 2 * 2 * 64 * max(columns) * 2
    kv_bytes = 3 * 96 * sum(columns) * 2
    barriers = 2 * 2 + 4 * 3
    told = 2 * 2 * 8 + 2 * 16 if schedule != "grid" else 0  # barriers and places of two tiles
    wild = 2 * 2 * 4 * 4 if softmax != "exact" else 0  # two words a warp
    assert need.smem_bytes == q_bytes + kv_bytes + 8 * barriers + told + wild
    assert need.smem_bytes % 8 == 0


def test_p_in_shared_memory_takes_parts_of_64_columns_and_gives_registers_back() -> None:
    for B_c, columns in ((64, 64), (80, 128), (176, 192)):
        one = config(num_warpgroups=3, B_c=B_c)
        in_registers, in_smem = (FAMILY.resources(spec_of(64), replace(one, p_operand=p)) for p in P_OPERANDS)
        assert in_smem.smem_bytes - in_registers.smem_bytes == 3 * 64 * columns * 2
        assert in_registers.registers - in_smem.registers == B_c // 4 - P_REGISTERS


def test_registers_of_all_warpgroups_fit_the_sm_and_the_launch() -> None:
    for num_warpgroups, (producer, consumer) in REGISTERS.items():
        assert producer % 8 == consumer % 8 == 0  # what setmaxnreg takes
        total = 128 * (producer + num_warpgroups * consumer)
        assert total <= REGISTERS_PER_SM
        # The launch gives every thread the same number, from which setmaxnreg moves them: never more than there are.
        at_launch = total // (128 * (num_warpgroups + 1)) // 8 * 8
        assert producer <= at_launch <= consumer <= 255


def test_registers_count_what_is_alive_at_once() -> None:
    need = FAMILY.resources(spec_of(128), config(B_c=96))
    wider = FAMILY.resources(spec_of(128), config(B_c=128))
    assert wider.registers - need.registers == 32 // 2 + 32 // 4  # scores in fp32, probabilities in pairs of 16 bits
    assert FAMILY.resources(spec_of(256), config(B_c=96)).registers - need.registers == 64  # 128 more columns of O_i


@pytest.mark.parametrize(("schedule", "grid"), [("grid", 2 * 3 * 40), ("static", 132), ("dynamic", 132)])
def test_the_grid_is_a_block_per_tile_or_per_sm(schedule: str, grid: int) -> None:
    the_config = config(schedule=schedule, q_stages=1)
    shape = ProblemShape(3, 129, 7, 40, 40)
    geometry = FAMILY.geometry(spec_of(64, name="causal"), the_config, shape, sm_count=132)
    assert geometry.grid == (grid, 1, 1) and geometry.threads == 384
    assert geometry.smem_bytes == FAMILY.resources(spec_of(64), the_config).smem_bytes
    few = FAMILY.geometry(spec_of(64), the_config, ProblemShape(1, 128, 7, 3, 3), sm_count=132)
    assert few.grid == (3, 1, 1)  # no block without a tile
    with pytest.raises(ConfigError, match="2147483647 tiles"):
        FAMILY.geometry(spec_of(64), the_config, ProblemShape(1 << 20, 1, 1, 1 << 11, 1), sm_count=132)


@pytest.mark.parametrize("shape", [ProblemShape(1, 5, 0, 1, 1), ProblemShape(2, 70000, 1 << 20, 48, 8)])
def test_sections_hold_between_one_head_and_all(shape: ProblemShape) -> None:
    values = FAMILY.schedule_arguments(spec_of(128), config(), shape)
    assert 1 <= values["section_heads"] <= values["num_heads_total"] == shape.batch * shape.nheads
    assert values["num_row_tiles"] == -(-shape.seqlen_q // 128)
    assert values["num_tiles"] == values["num_row_tiles"] * values["num_heads_total"]


def test_arguments_begin_with_the_maps_on_their_alignment() -> None:
    spec = spec_of(128, name="softcap+alibi")
    fields = FAMILY.arguments(spec)
    names = [field.name for field in fields]
    assert len(set(names)) == len(names)
    assert names[:7] == ["q_map", "k_map", "v_map", "o_map", "o", "lse", "next_tile"]
    layout = layout_of(fields)
    assert layout.size % 64 == 0 and layout.size >= 4 * 128
    maps = FAMILY.tensor_maps(spec, config(B_c=96))
    assert [(field.name, field.tensor, field.rows) for field in maps] == [
        ("q_map", "q", 64),
        ("k_map", "k", 96),
        ("v_map", "v", 96),
        ("o_map", "o", 64),
    ]
    assert all(field.rows <= 256 for field in maps)  # the largest box of the copy engine


def test_only_the_dynamic_schedule_draws_tiles() -> None:
    assert [FAMILY.draws_tiles(config(schedule=name)) for name in ("grid", "static", "dynamic")] == [False, False, True]


# ---- Which family ------------------------------------------------------------------------------------------------


def test_it_is_for_hopper_alone_and_the_best_there() -> None:
    assert FAMILY.target(SM90) == "sm_90a"
    assert [family.name for family in families_for(AttentionSpec(), SM90)] == ["forward_sm90", "forward_sm80"]
    for arch in ARCHS.values():
        if arch.cc != (9, 0):
            assert "compute capability 9.0" in str(FAMILY.unsupported_reason(AttentionSpec(), arch))
            assert [family.name for family in families_for(AttentionSpec(), arch)] == ["forward_sm80"]


SHAPE = ProblemShape(2, 33, 47, 4, 2)
DENSE = {"q": (33 * 256, 256, 64), "k": (47 * 128, 128, 64), "v": (47 * 128, 128, 64)}


def test_dense_and_permuted_strides_are_read_in_place() -> None:
    assert FAMILY.layout_reason(DENSE, SHAPE) is None
    heads_first = DENSE | {"k": (47 * 128, 64, 47 * 64)}
    assert FAMILY.layout_reason(heads_first, SHAPE) is None
    assert choose_family(AttentionSpec(head_dim=64), SM90, strides=heads_first, shape=SHAPE).passed_over == ()


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("k", (0, 128, 64)),
        ("v", (47 * 128, 128, 0)),
        ("q", (33 * 256, 0, 64)),
        ("k", (1 << 39, 128, 64)),
        ("q", (-8, 256, 64)),
    ],
)
def test_strides_that_the_copy_engine_refuses_fall_back_to_the_ampere_family(name: str, strides) -> None:
    given = DENSE | {name: strides}
    reason = FAMILY.layout_reason(given, SHAPE)
    assert reason is not None and f"{name} has {strides}" in reason
    choice = choose_family(AttentionSpec(head_dim=64), SM90, strides=given, shape=SHAPE)
    assert choice.family.name == "forward_sm80"
    assert len(choice.passed_over) == 1 and choice.passed_over[0].startswith("forward_sm90 cannot read")
    with pytest.raises(UnsupportedError, match="with these strides"):
        choose_family(AttentionSpec(head_dim=64), SM90, name="forward_sm90", strides=given, shape=SHAPE)


def test_a_stride_that_is_never_stepped_along_does_not_matter() -> None:
    given = {"q": (0, 64, 0), "k": (-1, 64, 0), "v": (1 << 50, 64, 0)}
    assert FAMILY.layout_reason(given, ProblemShape(1, 33, 47, 1, 1)) is None
    assert (
        FAMILY.layout_reason({"q": (0, 0, 64), "k": (0, 128, 64), "v": (0, 128, 64)}, ProblemShape(1, 1, 47, 4, 2))
        is None
    )
    just = (1 << 39) - 8  # 2^40 - 16 bytes: the last stride below the limit
    assert FAMILY.layout_reason(DENSE | {"k": (just, 128, 64)}, SHAPE) is None


def test_a_family_can_be_asked_for() -> None:
    spec = AttentionSpec(head_dim=64)
    assert choose_family(spec, SM90).family is family_named("forward_sm90")
    assert choose_family(spec, SM90, name="forward_sm80").family is family_named("forward_sm80")
    with pytest.raises(UnsupportedError, match=r"forward_sm90 cannot do .* on sm_80"):
        choose_family(spec, ARCHS["sm_80"], name="forward_sm90")
    with pytest.raises(UnsupportedError, match="Did you mean 'forward_sm90'"):
        choose_family(spec, SM90, name="forward_sm9")
