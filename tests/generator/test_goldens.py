"""The generated text of some corners, held byte for byte. `pytest --update-golden` writes them anew."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flashsmith.generator import mods
from flashsmith.generator.arch import ARCHS, Arch
from flashsmith.generator.families.base import KernelConfig
from flashsmith.generator.families.forward_sm80 import ForwardSm80Config
from flashsmith.generator.families.forward_sm90 import ForwardSm90Config
from flashsmith.generator.language import and_masks, compose_scores, trace_mask, trace_score
from flashsmith.generator.rendering import render
from flashsmith.generator.spec import AttentionSpec

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SLOPES = np.ones(4, np.float32)
IDS = np.zeros(64, np.int32)


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 2 == 0) & (kv_idx <= q_idx)


CAUSAL = trace_mask(mods.causal).graph
WINDOW = and_masks(trace_mask(mods.causal), trace_mask(mods.sliding_window(128, -1))).graph
CAPPED_ALIBI = compose_scores(trace_score(mods.softcap(30.0)), trace_score(mods.alibi(SLOPES))).graph

#: name -> (spec, (B_r, B_c, num_warps, num_stages, q_in_registers, softmax, schedule, min_blocks), arch)
CORNERS = {
    "bf16_d128_full": (AttentionSpec(), (128, 48, 4, 2, False, "optimistic", "linear", 1), "sm_90"),
    "bf16_d128_full_one_stage": (AttentionSpec(), (128, 32, 4, 1, False, "exact", "linear", 1), "sm_80"),
    "fp16_d128_causal": (
        AttentionSpec(dtype="fp16", mask=CAUSAL),
        (128, 48, 4, 3, False, "optimistic", "longest_first", 1),
        "sm_90",
    ),
    "bf16_d64_causal_linear": (
        AttentionSpec(head_dim=64, mask=CAUSAL),
        (64, 64, 4, 2, True, "exact", "linear", 3),
        "sm_90",
    ),
    "bf16_d64_window": (
        AttentionSpec(head_dim=64, mask=WINDOW),
        (128, 48, 4, 2, False, "optimistic", "longest_first", 3),
        "sm_80",
    ),
    "bf16_d64_softcap_alibi": (
        AttentionSpec(head_dim=64, mask=CAUSAL, score=CAPPED_ALIBI),
        (128, 32, 4, 2, False, "exact", "longest_first", 1),
        "sm_90",
    ),
    "bf16_d128_dilated": (
        AttentionSpec(mask=trace_mask(dilated).graph),
        (64, 32, 4, 2, False, "optimistic", "longest_first", 1),
        "sm_90",
    ),
    "bf16_d128_document": (
        AttentionSpec(mask=trace_mask(mods.document(IDS)).graph),
        (64, 32, 4, 1, False, "exact", "linear", 1),
        "sm_120",
    ),
    "bf16_d256_causal": (
        AttentionSpec(head_dim=256, mask=CAUSAL),
        (64, 32, 4, 2, True, "optimistic", "longest_first", 1),
        "sm_90",
    ),
    "fp16_d72_dv40": (
        AttentionSpec(dtype="fp16", head_dim=72, head_dim_v=40),
        (128, 64, 8, 1, True, "exact", "linear", 1),
        "sm_86",
    ),
    "bf16_d192_dv128_causal": (
        AttentionSpec(head_dim=192, head_dim_v=128, mask=CAUSAL),
        (64, 32, 4, 2, True, "optimistic", "longest_first", 1),
        "sm_100",
    ),
    "bf16_d8_dv256": (
        AttentionSpec(head_dim=8, head_dim_v=256),
        (64, 32, 4, 1, False, "exact", "linear", 1),
        "sm_80",
    ),
}
#: name -> (spec, values of a ForwardSm90Config), for sm_90
HOPPER_CORNERS = {
    "hopper_bf16_d128_causal": (
        AttentionSpec(mask=CAUSAL),
        (2, 128, 2, 2, "optimistic", True, "dynamic", "registers", False),
    ),
    "hopper_fp16_d64_full": (
        AttentionSpec(dtype="fp16", head_dim=64),
        (4, 64, 3, 2, "wary", True, "static", "registers", False),
    ),
    "hopper_bf16_d64_causal_p_shared": (
        AttentionSpec(head_dim=64, mask=CAUSAL),
        (3, 176, 2, 2, "optimistic", True, "dynamic", "shared", False),
    ),
    "hopper_bf16_d256_full": (
        AttentionSpec(head_dim=256),
        (2, 80, 2, 1, "optimistic", False, "static", "registers", False),
    ),
    "hopper_bf16_d72_dv40_window": (
        AttentionSpec(head_dim=72, head_dim_v=40, mask=WINDOW),
        (2, 96, 2, 1, "exact", False, "grid", "registers", False),
    ),
    "hopper_bf16_d96_document": (
        AttentionSpec(head_dim=96, mask=trace_mask(mods.document(IDS)).graph),
        (3, 64, 3, 2, "optimistic", True, "dynamic", "registers", False),
    ),
    "hopper_bf16_d128_causal_alibi_packed": (
        AttentionSpec(mask=CAUSAL, score=trace_score(mods.alibi(SLOPES)).graph),
        (1, 96, 3, 2, "optimistic", False, "dynamic", "registers", True),
    ),
    "hopper_fp16_d64_window_packed": (
        AttentionSpec(dtype="fp16", head_dim=64, mask=WINDOW),
        (2, 128, 2, 1, "exact", False, "static", "registers", True),
    ),
}
KERNELS: dict[str, tuple[AttentionSpec, KernelConfig, Arch]] = {
    **{name: (spec, ForwardSm80Config(*values), ARCHS[arch]) for name, (spec, values, arch) in CORNERS.items()},
    **{name: (spec, ForwardSm90Config(*values), ARCHS["sm_90"]) for name, (spec, values) in HOPPER_CORNERS.items()},
}


def text_of(name: str) -> str:
    return render(*KERNELS[name]).text


@pytest.mark.parametrize("name", KERNELS)
def test_the_text_is_the_golden_one(name: str, update_golden: bool) -> None:
    path = GOLDEN / f"{name}.cu"
    text = text_of(name)
    if update_golden:
        path.write_text(text)
    assert path.read_text() == text, f"{name} changed; look at the diff, then run pytest --update-golden"


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.cu")} == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_lines_are_short_and_clean(name: str) -> None:
    lines = text_of(name).split("\n")
    assert lines[-1] == ""
    for number, line in enumerate(lines, 1):
        assert len(line) <= 100, f"{name}:{number} has {len(line)} columns"
        assert line == line.rstrip()


def test_two_configs_differ_by_a_few_lines() -> None:
    spec = AttentionSpec()
    arch: Arch = ARCHS["sm_90"]
    texts = [
        render(spec, ForwardSm80Config(128, b_c, 4, 2, False, "exact", "linear", 1), arch).text for b_c in (32, 64)
    ]
    first, second = (text.split("\n") for text in texts)
    assert len(first) == len(second)
    different = [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]]
    assert len(different) == 2  # the header's config line and the constant


@pytest.mark.parametrize("name", HOPPER_CORNERS)
def test_no_primitive_of_a_hopper_kernel_is_left_unused(name: str) -> None:
    source = render(*KERNELS[name])
    defined = re.findall(r"__forceinline__ [\w ]+?\b(\w+)\(", source.section("primitives").text)
    assert len(defined) == len(set(defined)) > 15
    for function in defined:
        assert len(re.findall(rf"\b{function}\b", source.text)) > 1, f"{function} is never called"


@pytest.mark.parametrize("name", KERNELS)
def test_the_text_is_as_clang_format_would_have_it(name: str, repo_root: Path) -> None:
    tool = shutil.which("clang-format") or shutil.which("clang-format", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("needs clang-format (pip install flashsmith[dev])")
    text = text_of(name)
    command = [tool, f"--style=file:{repo_root / '.clang-format'}", f"--assume-filename={name}.cu"]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    changed = difflib.unified_diff(text.split("\n"), run.stdout.split("\n"), "written", "formatted", n=0)
    assert run.stdout == text, "\n".join(changed)
