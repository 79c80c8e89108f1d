"""The emulator compiles the kernel that the GPU runs: only the primitives are swapped."""

from __future__ import annotations

import re

import pytest

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import families_for
from flashsmith.generator.rendering import render
from flashsmith.generator.source import KernelSource, Section
from flashsmith.runtime.emulator.build import HERE
from flashsmith.runtime.emulator.host_text import cuda_spellings, host_text, host_text_of
from flashsmith.runtime.problem import problem_of

ARCH = ARCHS["sm_80"]


@pytest.fixture(scope="module")
def source() -> KernelSource:
    spec = problem_of(dtype="bf16", head_dim=64, causal=True, softcap=30.0).spec
    family = families_for(spec, ARCH)[0]
    return render(spec, family.default_config(spec, ARCH), ARCH)


def test_all_but_the_primitives_is_equal_to_the_byte(source: KernelSource) -> None:
    host = host_text(source).text
    for section in source.sections:
        if section.name == "primitives":
            assert section.text not in host
        else:
            assert section.text in host
    kept = re.sub(r'^#line \d+ ".*"\n', "", host, flags=re.MULTILINE)
    expected = '#include "prelude.h"\n'
    for section in source.sections:
        expected += '#include "primitives_host.h"\n' if section.name == "primitives" else f"{section.text}\n"
    call = f"{source.entry}(*static_cast<const Arguments*>(arguments))"
    expected += f"void emulator_kernel(const void* arguments) {{ {call}; }}\n"
    assert kept == expected


def test_lines_are_numbered_as_in_the_cuda_file(source: KernelSource) -> None:
    text = host_text(source)
    assert "\n".join(text.lines) == source.text
    number, seen, counting = 0, 0, False
    for line in text.text.split("\n"):
        match = re.match(r'#line (\d+) "(.*)"', line)
        if match:
            number, counting = int(match[1]) - 1, match[2] == text.file_name
            continue
        number += 1
        if line.strip() and number and counting and number <= len(text.lines) and not line.startswith("#include"):
            assert text.lines[number - 1] == line, number
            seen += 1
    assert seen > 100


def test_a_generated_kernel_has_no_cuda_spelling_outside_its_primitives(source: KernelSource) -> None:
    assert cuda_spellings(source) == ()


@pytest.mark.parametrize(
    "spelling", ["__syncthreads();", 'asm volatile("");', "x = threadIdx.x;", "__expf(x);", "atomicAdd(p, 1);"]
)
def test_a_cuda_spelling_is_named_by_line(source: KernelSource, spelling: str) -> None:
    kernel = source.section("kernel").text
    marked = kernel.replace("  const int lane", f"  {spelling}\n  const int lane", 1)
    sections = tuple(Section(s.name, marked) if s.name == "kernel" else s for s in source.sections)
    changed = KernelSource(**{**{f: getattr(source, f) for f in source.__dataclass_fields__}, "sections": sections})
    line = changed.text.split("\n").index(f"  {spelling}") + 1
    assert {found.rpartition(": ")[0] for found in cuda_spellings(changed)} == {f"forward_sm80.cu:{line}"}


def test_a_cuda_spelling_in_a_comment_is_none() -> None:
    text = host_text_of((Section("kernel", "// asm\n"),), entry="k", file_name="k.cu").text
    assert "// asm" in text


def test_every_primitive_of_the_template_has_a_host_twin_with_its_parameters() -> None:
    from flashsmith.generator.environment import TEMPLATE_ROOT

    signature = re.compile(r"__device__ __forceinline__ ([\w ]+?)\b(\w+)\(([^{]*?)\) \{", re.DOTALL)
    template = "\n".join(path.read_text() for path in sorted(TEMPLATE_ROOT.glob("*/primitives*.jinja")))
    twins = "\n".join(path.read_text() for path in HERE.glob("primitives_*.h"))
    by_name = {
        match[2]: (match[1].strip(), _types(match[3]))
        for match in re.finditer(r"inline ([\w ]+?)\b(\w+)\(([^{]*?)\) \{", twins, re.DOTALL)
    }
    found = list(signature.finditer(template))
    assert len(found) > 40
    for match in found:
        assert match[2] in by_name, f"{match[2]} has no host twin"
        assert by_name[match[2]] == (match[1].strip(), _types(match[3])), match[2]


def _types(parameters: str) -> list[str]:
    kept = [p.strip() for p in parameters.replace("\n", " ").split(",") if p.strip() and "EMULATOR_PLACE" not in p]
    # `u32 (&r)[4]` and `const void* p`: the type without the name.
    return [re.sub(r"\s+", " ", re.sub(r"\b\w+(\)\[\w+\])?$", r"\1", p)).strip() for p in kept]
