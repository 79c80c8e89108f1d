"""The Hopper forward's `pack_gqa`: which problems and shapes it serves, its tiles, and its place in the space."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import numpy as np
import pytest

from flashsmith.generator import mods
from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import ConfigError
from flashsmith.generator.families.forward_sm90 import SECTION_BYTES, ForwardSm90, ForwardSm90Config
from flashsmith.generator.language import and_masks, trace_mask, trace_score
from flashsmith.generator.rendering import render
from flashsmith.generator.spec import AttentionSpec, ProblemShape

FAMILY = ForwardSm90()
SM90 = ARCHS["sm_90"]
CAUSAL = trace_mask(mods.causal)
ALIBI = trace_score(mods.alibi(np.ones(4, np.float32))).graph
PLAIN = AttentionSpec()
PACKED = ForwardSm90Config(2, 128, 2, 1, "optimistic", False, "static", "registers", True)
LEFT = np.zeros(4, np.int32)


def near_by_head(b, h, q_idx, kv_idx):
    return kv_idx >= q_idx - LEFT[h]


def every_nth(b, h, q_idx, kv_idx):
    return (kv_idx - q_idx) % (h + 1) == 0


def dilated(b, h, q_idx, kv_idx):
    return (kv_idx - q_idx) % 3 == 0


def of_batch(b, h, q_idx, kv_idx):
    return kv_idx >= q_idx - LEFT[b]


@pytest.mark.parametrize("mask", [near_by_head, every_nth])
def test_a_mask_that_shows_each_head_other_keys_is_excluded(mask) -> None:
    for graph in (trace_mask(mask).graph, and_masks(CAUSAL, trace_mask(mask)).graph):
        excluded = FAMILY.exclusion(AttentionSpec(mask=graph), PACKED, SM90)
        assert excluded.kind == "pack_gqa"
        assert graph.describe() in excluded.reason and "depends on h. Use pack_gqa=False." in excluded.reason
        assert not any(config.pack_gqa for config in FAMILY.space(AttentionSpec(mask=graph), SM90))


@pytest.mark.parametrize("mask", [None, dilated, of_batch, mods.causal, mods.document(np.zeros(64, np.int32))])
def test_any_other_mask_and_any_score_is_served(mask) -> None:
    graph = None if mask is None else trace_mask(mask).graph
    for score in (None, ALIBI):
        assert FAMILY.exclusion(AttentionSpec(mask=graph, score=score), PACKED, SM90) is None


def test_a_group_must_divide_64() -> None:
    served = [g for g in range(1, 130) if FAMILY.shape_reason(PLAIN, PACKED, ProblemShape(1, 5, 7, g, 1)) is None]
    assert served == [2, 4, 8, 16, 32, 64]
    plain = ForwardSm90Config(2, 128, 2, 1, "optimistic", False, "static", "registers", False)
    assert FAMILY.shape_reason(PLAIN, plain, ProblemShape(1, 5, 7, 3, 1)) is None
    with pytest.raises(ConfigError, match=r"nheads / nheads_k, must be .* divide 64, but got 3\. Use pack_gqa=False"):
        FAMILY.check_shape(PLAIN, PACKED, ProblemShape(1, 5, 7, 24, 8))


def test_packed_rows_have_32_bit_numbers() -> None:
    most = ProblemShape(1, (1 << 31) // 8 - 32, 1, 8, 1)
    assert FAMILY.shape_reason(PLAIN, PACKED, most) is None
    more = ProblemShape(1, most.seqlen_q + 1, 1, 8, 1)
    reason = FAMILY.shape_reason(PLAIN, PACKED, more)
    assert reason == (
        "pack_gqa takes at most 2147483392 rows of a KV head, but got 268435425 of each of 8 heads. Use pack_gqa=False."
    )


def test_a_spec_with_another_ratio_is_excluded() -> None:
    kinds = {ratio: FAMILY.exclusion(AttentionSpec(gqa_ratio=ratio), PACKED, SM90) for ratio in (1, 3, 4)}
    assert [found and found.kind for found in kinds.values()] == ["pack_gqa", "pack_gqa", None]


@pytest.mark.parametrize(("seqlen_q", "row_tiles"), [(1, 1), (16, 1), (17, 2), (129, 9)])
def test_rows_are_those_of_all_heads_of_a_group(seqlen_q: int, row_tiles: int) -> None:
    shape = ProblemShape(3, seqlen_q, 4096, 32, 4)
    values = FAMILY.schedule_arguments(PLAIN, PACKED, shape)
    assert values["num_row_tiles"] == row_tiles == -(-seqlen_q * 8 // 128)
    assert values["num_heads_total"] == 3 * 4
    assert values["num_tiles"] == row_tiles * 12
    assert values["section_heads"] == SECTION_BYTES // (4096 * 512)  # each has keys of its own
    assert FAMILY.geometry(PLAIN, PACKED, shape, sm_count=132).grid == (min(row_tiles * 12, 132), 1, 1)


def test_tiles_are_counted_packed_before_the_limit_is_held_against_them() -> None:
    shape = ProblemShape(1 << 20, 1, 1, 1 << 11, 1 << 6)
    assert FAMILY.geometry(PLAIN, PACKED, shape, sm_count=132).grid == (132, 1, 1)
    with pytest.raises(ConfigError, match="2147483647 tiles"):
        FAMILY.geometry(PLAIN, PACKED, ProblemShape(1 << 20, 1, 1, 1 << 12, 1 << 11), sm_count=132)


def test_q_and_o_are_mapped_packed_and_k_and_v_are_not() -> None:
    maps = FAMILY.tensor_maps(PLAIN, PACKED)
    assert [(field.name, field.rows, field.packed) for field in maps] == [
        ("q_map", 64, True),
        ("k_map", 128, False),
        ("v_map", 128, False),
        ("o_map", 64, True),
    ]


def test_the_space_is_half_as_large_again_at_most() -> None:
    for mask in (None, CAUSAL.graph):
        space = FAMILY.space(AttentionSpec(mask=mask), SM90)
        packed = [config for config in space if config.pack_gqa]
        assert 0 < len(packed) < 0.5 * (len(space) - len(packed))
        assert all(config.B_r <= 128 and config.schedule != "grid" for config in packed)
        assert not any(config.pack_gqa for config in FAMILY.default_configs(AttentionSpec(mask=mask), SM90))


def test_a_packed_kernel_says_what_its_arguments_count() -> None:
    text = render(PLAIN, PACKED, SM90).text
    assert "// T_r = ceil(seqlen_q * group_size / B_r)" in text and "// batch * nheads_k" in text
    assert "tma_load_5d(" in text
    # The arguments themselves are those of every kernel of the spec.
    names = [field.name for field in FAMILY.arguments(PLAIN)]
    assert [field.name for field in render(PLAIN, PACKED, SM90).arguments] == names
