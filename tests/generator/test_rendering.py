"""Rendering: deterministic, self-contained, with neither residue nor unused parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from flashsmith.generator import mods
from flashsmith.generator.arch import ARCHS
from flashsmith.generator.environment import cpp, environment, generator_digest
from flashsmith.generator.errors import ConfigError, RenderError
from flashsmith.generator.families.forward_sm80 import ForwardSm80, ForwardSm80Config
from flashsmith.generator.language import trace_mask
from flashsmith.generator.rendering import _align_comments, _check_residue, _used_functions, render
from flashsmith.generator.spec import AttentionSpec

SM90 = ARCHS["sm_90"]
FAMILY = ForwardSm80()


def source(spec: AttentionSpec | None = None):
    spec = spec or AttentionSpec()
    return render(spec, FAMILY.default_config(spec, SM90), SM90)


def test_sections_stand_in_their_order() -> None:
    masked = source(AttentionSpec(mask=trace_mask(mods.causal).graph))
    assert [s.name for s in masked.sections] == ["header", "types", "primitives", "mods", "kernel"]
    assert [s.name for s in source().sections] == ["header", "types", "primitives", "kernel"]


def test_the_text_is_the_same_in_another_process() -> None:
    program = (
        "from flashsmith.generator.arch import ARCHS\n"
        "from flashsmith.generator.families.forward_sm80 import ForwardSm80\n"
        "from flashsmith.generator.rendering import render\n"
        "from flashsmith.generator.spec import AttentionSpec\n"
        "from flashsmith.generator.language import trace_mask\n"
        "from flashsmith.generator import mods\n"
        "spec = AttentionSpec(mask=trace_mask(mods.causal).graph)\n"
        "print(render(spec, ForwardSm80().default_config(spec, ARCHS['sm_90']), ARCHS['sm_90']).digest)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert run.stdout.strip() == source(AttentionSpec(mask=trace_mask(mods.causal).graph)).digest


def test_the_source_includes_nothing() -> None:
    assert "#include" not in source().text


def test_every_function_is_used() -> None:
    text = source(AttentionSpec(mask=trace_mask(mods.causal).graph)).text
    for name in re.findall(r"__forceinline__ [\w ]+?\b(\w+)\(", text):
        assert len(re.findall(rf"\b{name}\b", text)) > 1, name


def test_all_ptx_sits_in_the_primitives() -> None:
    for section in source(AttentionSpec(mask=trace_mask(mods.causal).graph)).sections:
        if section.name != "primitives":
            for spelling in ("asm", "threadIdx", "blockIdx", "__shfl", "__sync", "__shared__", "__expf"):
                assert spelling not in section.text, (section.name, spelling)


def test_a_config_outside_the_space_is_refused_before_rendering() -> None:
    with pytest.raises(ConfigError, match="shared memory"):
        render(AttentionSpec(head_dim=256), ForwardSm80Config(128, 128, 8, 3, False, "exact", "linear", 1), SM90)


@pytest.mark.parametrize("residue", ["a {{ b", "c %} d", "x \n", "a\n\n\nb"])
def test_residue_is_a_fault(residue: str) -> None:
    with pytest.raises(RenderError, match="Residue"):
        _check_residue(residue)


@pytest.mark.parametrize("value", [None, True, 0.5])
def test_templates_cannot_print_python_spellings(value: object) -> None:
    with pytest.raises(RenderError, match="cpp filter"):
        environment().from_string("{{ value }}").render(value=value)


def test_the_cpp_filter_prints_literals() -> None:
    assert [cpp(True), cpp(3), cpp(0.125)] == ["true", "3", "0.125f"]


def test_unused_primitives_are_left_out_and_needed_ones_kept() -> None:
    text = (
        "// title\n\n__device__ __forceinline__ int a() { return b(); }\n\n"
        "__device__ __forceinline__ int b() { return 1; }\n\n__device__ __forceinline__ int c() { return 2; }\n"
    )
    kept = _used_functions(text, "int x = a();")
    assert "int a()" in kept and "int b()" in kept and "int c()" not in kept


def test_trailing_comments_share_a_column() -> None:
    assert _align_comments("int a;  // one\nint long_name;    // two\n\nint b;  // three\n") == (
        "int a;          // one\nint long_name;  // two\n\nint b;  // three\n"
    )


def test_the_generator_digest_is_stable_and_hex() -> None:
    assert generator_digest() == generator_digest()
    assert re.fullmatch(r"[0-9a-f]{64}", generator_digest())
