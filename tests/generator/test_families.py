"""The config space of the Ampere forward: what is in it, what is not, and why."""

from __future__ import annotations

import itertools

import pytest

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import ConfigError, UnsupportedError
from flashsmith.generator.families import FAMILIES, families_for, family_named
from flashsmith.generator.families.base import ArgumentField, layout_of
from flashsmith.generator.families.forward_common import chunks_of
from flashsmith.generator.families.forward_sm80 import ForwardSm80, ForwardSm80Config
from flashsmith.generator.spec import AttentionSpec, ProblemShape

FAMILY = ForwardSm80()
DIMS = [(8, 8), (64, 64), (72, 40), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (256, 8), (8, 256)]


def config(**changes: object) -> ForwardSm80Config:
    values = {
        "B_r": 128,
        "B_c": 64,
        "num_warps": 4,
        "num_stages": 2,
        "q_in_registers": False,
        "softmax": "exact",
        "schedule": "linear",
        "min_blocks": 1,
    }
    return ForwardSm80Config.from_dict(values | changes)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_architecture_has_a_default_inside_its_space(arch, dims) -> None:
    spec = AttentionSpec(head_dim=dims[0], head_dim_v=dims[1])
    default = FAMILY.default_config(spec, arch)
    assert FAMILY.exclusion(spec, default, arch) is None
    need = FAMILY.resources(spec, default)
    assert need.smem_bytes <= arch.smem_per_block
    assert default in FAMILY.space(spec, arch)


def test_candidates_are_distinct_and_in_a_fixed_order() -> None:
    spec = AttentionSpec(head_dim=64)
    once = list(FAMILY.candidates(spec, ARCHS["sm_90"]))
    assert once == list(FAMILY.candidates(spec, ARCHS["sm_90"]))
    assert len(set(once)) == len(once)


def test_every_exclusion_names_its_values_and_a_remedy() -> None:
    kinds = set()
    for dims, arch in itertools.product(((64, 64), (256, 256)), (ARCHS["sm_86"], ARCHS["sm_90"])):
        spec = AttentionSpec(head_dim=dims[0], head_dim_v=dims[1])
        for candidate in FAMILY.candidates(spec, arch):
            excluded = FAMILY.exclusion(spec, candidate, arch)
            if excluded is None:
                continue
            kinds.add(excluded.kind)
            assert any(verb in excluded.reason for verb in ("Lower", "Raise", "Use"))
            with pytest.raises(ConfigError, match=r"\."):
                FAMILY.check(spec, candidate, arch)
    assert kinds == {"rows per warp", "shared memory", "registers", "residency", "schedule", "duplicate"}


def test_shared_memory_is_q_and_every_stage_of_k_and_v() -> None:
    spec = AttentionSpec(head_dim=128, head_dim_v=64)
    need = FAMILY.resources(spec, config(B_r=128, B_c=64, num_stages=3))
    assert need.smem_bytes == 2 * (128 * 128 + 3 * 64 * (128 + 64))


def test_a_wider_o_than_q_is_staged_in_full() -> None:
    spec = AttentionSpec(head_dim=64, head_dim_v=128)
    need = FAMILY.resources(spec, config(B_r=64, B_c=32, num_stages=1))
    assert need.smem_bytes == 2 * (64 * 128 + 32 * (64 + 128))


def test_too_much_shared_memory_says_need_limit_and_remedy() -> None:
    spec = AttentionSpec(head_dim=256)
    excluded = FAMILY.exclusion(spec, config(num_warps=8, B_c=128, num_stages=3), ARCHS["sm_90"])
    assert excluded is not None and excluded.kind == "shared memory"
    assert "458752 bytes" in excluded.reason and "232448" in excluded.reason and "Lower" in excluded.reason


@pytest.mark.parametrize(("head_dim", "chunks"), [(8, 2), (16, 2), (24, 4), (64, 8), (72, 10), (256, 32)])
def test_rows_are_padded_to_the_mma_depth(head_dim: int, chunks: int) -> None:
    assert chunks_of(head_dim) == chunks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"B_r": -16}, "B_r must be a positive multiple of 16, but got -16"),
        ({"B_c": 24}, "B_c must be a positive multiple of 16"),
        ({"num_warps": 3}, "B_r must be a multiple of 16 \\* num_warps"),
        ({"num_warps": 0}, "num_warps must be at least 1"),
        ({"num_stages": "3"}, "num_stages of a forward_sm80 config must be int"),
        ({"q_in_registers": 1}, "q_in_registers of a forward_sm80 config must be bool"),
        ({"softmax": "approximate"}, "softmax must be one of exact, optimistic"),
        ({"schedule": "random"}, "schedule must be one of linear, longest_first"),
        ({"tile": 1}, "unknown or missing: tile"),
    ],
)
def test_illegal_configs_say_rule_and_value(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_a_config_round_trips() -> None:
    original = config()
    assert ForwardSm80Config.from_dict(original.to_dict()) == original
    assert str(original).startswith("B_r=128 B_c=64 num_warps=4")


def test_the_registry_finds_and_refuses() -> None:
    assert family_named("forward_sm80") is FAMILIES["forward_sm80"]
    with pytest.raises(UnsupportedError, match="Did you mean 'forward_sm80'"):
        family_named("forward_sm8")
    assert [f.name for f in families_for(AttentionSpec(), ARCHS["sm_120"])] == ["forward_sm80"]


def test_the_grid_covers_every_row_once_and_refuses_more_than_a_launch_takes() -> None:
    spec = AttentionSpec(head_dim=64)
    geometry = FAMILY.geometry(spec, config(), ProblemShape(3, 129, 7, 40000, 40000), sm_count=132)
    assert geometry.grid == (2 * 3 * 40000, 1, 1)
    assert geometry.threads == 128
    with pytest.raises(ConfigError, match="2147483647 thread blocks"):
        FAMILY.geometry(spec, config(), ProblemShape(1 << 20, 1, 1, 1 << 12, 1), sm_count=132)


@pytest.mark.parametrize("shape", [ProblemShape(1, 5, 0, 1, 1), ProblemShape(2, 70000, 1 << 20, 48, 8)])
def test_sections_hold_between_one_head_and_all(shape: ProblemShape) -> None:
    values = FAMILY.schedule_arguments(AttentionSpec(head_dim=128), config(), shape)
    assert 1 <= values["section_heads"] <= values["num_heads_total"] == shape.batch * shape.nheads
    assert values["num_row_tiles"] == -(-shape.seqlen_q // 128)


def test_arguments_are_laid_out_as_c_does() -> None:
    fields = FAMILY.arguments(AttentionSpec())
    names = [field.name for field in fields]
    assert len(set(names)) == len(names)
    assert names[:5] == ["q", "k", "v", "o", "lse"]
    layout = layout_of(fields)
    assert layout.size % 8 == 0
    with pytest.raises(AssertionError):
        layout_of((ArgumentField("int", "a", ""), ArgumentField("float*", "b", "")))
