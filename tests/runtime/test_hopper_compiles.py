"""Every default of the Hopper forward through NVRTC for sm_90a: nothing spills, no product waits for another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashsmith.generator import mods
from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import BuildGateError
from flashsmith.generator.families import family_named
from flashsmith.generator.families.forward_sm90 import ForwardSm90Config
from flashsmith.generator.language import and_masks, compose_scores, trace_mask, trace_score
from flashsmith.generator.spec import AttentionSpec
from flashsmith.runtime import nvrtc_library
from flashsmith.runtime.compiler import compile_kernel, fitting_default

FAMILY = family_named("forward_sm90")
SM90 = ARCHS["sm_90"]
CAUSAL = trace_mask(mods.causal)
SLOPES = np.ones(4, np.float32)
IDS = np.zeros(64, np.int32)


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 2 == 0) & (kv_idx <= q_idx)


MODS = {
    "none": (None, None),
    "causal": (CAUSAL, None),
    "window": (and_masks(CAUSAL, trace_mask(mods.sliding_window(128, -1))), None),
    "general": (trace_mask(dilated), None),
    "document": (trace_mask(mods.document(IDS)), None),
    "softcap+alibi": (CAUSAL, compose_scores(trace_score(mods.softcap(30.0)), trace_score(mods.alibi(SLOPES)))),
}
#: ptxas's words for products that it could not keep in flight.
SERIALISED = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514")


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_a_default_keeps_its_values_in_registers_and_its_products_in_flight(name: str, dims: tuple[int, int]) -> None:
    if nvrtc_library.installed_compiler() is None:
        pytest.skip("needs CuPy and an NVRTC wheel")
    mask, score = MODS[name]
    spec = AttentionSpec(
        head_dim=dims[0],
        head_dim_v=dims[1],
        mask=None if mask is None else mask.graph,
        score=None if score is None else score.graph,
    )
    chosen = fitting_default(spec, SM90, family=FAMILY, run_here=False)
    for config in FAMILY.default_configs(spec, SM90):
        kernel = compile_kernel(spec, config, SM90, family=FAMILY, gate=False, run_here=False)
        assert kernel.target == "sm_90a"
        words = " ".join(kernel.report.warnings)
        assert not any(code in words for code in SERIALISED), words
        if config == chosen:
            break
    # Where an earlier default spills, it is a later one that is used; that one passes the whole gate.
    try:
        compile_kernel(spec, chosen, SM90, family=FAMILY, run_here=False)
    except BuildGateError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize(
    ("head_dim", "name", "values"),
    [
        (64, "softcap+alibi", (2, 96, 2, 2, "exact", False, "dynamic", "registers")),
        (64, "none", (1, 176, 3, 1, "optimistic", False, "static", "registers")),
        (128, "causal", (2, 128, 2, 2, "optimistic", True, "dynamic", "registers")),
        (128, "none", (1, 128, 3, 1, "optimistic", False, "static", "registers")),
        (128, "document", (2, 80, 2, 1, "optimistic", False, "dynamic", "registers")),
        (256, "window", (2, 48, 2, 1, "optimistic", False, "static", "registers")),
    ],
)
def test_a_kernel_with_packed_heads_passes_the_gate(head_dim: int, name: str, values: tuple[object, ...]) -> None:
    if nvrtc_library.installed_compiler() is None:
        pytest.skip("needs CuPy and an NVRTC wheel")
    mask, score = (None if traced is None else traced.graph for traced in MODS[name])
    spec = AttentionSpec(head_dim=head_dim, mask=mask, score=score)
    config = ForwardSm90Config(*values, True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    report = compile_kernel(spec, config, SM90, family=FAMILY, run_here=False).report
    assert not any(code in " ".join(report.warnings) for code in SERIALISED)


@pytest.mark.parametrize(
    ("head_dim", "values"),
    [
        (64, (3, 176, 2, 2, "optimistic", True, "static", "shared", False)),
        (64, (3, 192, 2, 2, "exact", True, "static", "shared", False)),
        (64, (4, 96, 3, 2, "wary", True, "static", "shared", False)),
        (128, (3, 128, 2, 1, "exact", True, "static", "shared", False)),
    ],
)
def test_p_in_shared_memory_leaves_registers_for_a_wider_tile(
    head_dim: int, values: tuple[int | bool | str, ...]
) -> None:
    if nvrtc_library.installed_compiler() is None:
        pytest.skip("needs CuPy and an NVRTC wheel")
    spec, config = AttentionSpec(head_dim=head_dim), ForwardSm90Config(*values)  # type: ignore[arg-type]
    excluded = FAMILY.exclusion(spec, replace(config, p_operand="registers"), SM90)
    assert excluded is not None and excluded.kind == "registers"
    try:
        compile_kernel(spec, config, SM90, family=FAMILY, run_here=False)
    except BuildGateError as error:
        pytest.fail(str(error))
