"""From the text of a generated kernel to the C++ that the emulator compiles: only the primitives are swapped."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...generator.source import KernelSource, Section

PRIMITIVES = "primitives"

#: CUDA spellings that belong into primitives: elsewhere neither the host nor a reader knows what they do.
_CUDA_ONLY = re.compile(
    r"\b(?:asm|threadIdx|blockIdx|blockDim|gridDim|warpSize|__shared__|__constant__|__managed__"
    r"|__sync\w+|__shfl\w+|__ballot\w+|__any\w+|__all\w+|__thread\w+|__nanosleep|__trap|__ldg|__ldc[gasv]|__st\w+"
    r"|__cvta\w+|__float\w+|__int\w+_as\w+|__uint\w+_as\w+|__half\w*|__nv_\w+|__expf|__logf|__fdividef|__f\w+_r[nzud]"
    r"|atomic\w+|memcpy|memset|printf|volatile)\b"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HostText:
    """`text` is a C++ translation unit; `file_name` is how its lines are reported, numbered as in the CUDA file."""

    text: str
    file_name: str
    lines: tuple[str, ...]


def host_text(source: KernelSource) -> HostText:
    """The translation unit of `source`: every section but the primitives, to the byte, with its own line numbers."""
    return host_text_of(source.sections, entry=source.entry, file_name=f"{source.family}.cu")


def host_text_of(sections: tuple[Section, ...], *, entry: str, file_name: str) -> HostText:
    """As `host_text`, for sections that belong to no kernel family."""
    parts = ['#include "prelude.h"\n']
    cuda = ""
    for index, section in enumerate(sections):
        if index:
            cuda += "\n"  # as KernelSource.text joins them
        line = cuda.count("\n") + 1
        if section.name == PRIMITIVES:
            parts.append('#include "primitives_host.h"\n')
        else:
            parts.append(f'#line {line} "{file_name}"\n{section.text}\n')
        cuda += section.text
    parts.append(
        '#line 1 "emulator_kernel"\n'
        f"void emulator_kernel(const void* arguments) {{ {entry}(*static_cast<const Arguments*>(arguments)); }}\n"
    )
    return HostText("".join(parts), file_name, tuple(cuda.split("\n")))


def cuda_spellings(source: KernelSource) -> tuple[str, ...]:
    """CUDA-only spellings outside the primitives, as "file:line: spelling". A clean kernel has none."""
    found = []
    line = 1
    for section in source.sections:
        if section.name != PRIMITIVES:
            text = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), section.text)
            for number, content in enumerate(text.split("\n"), start=line):
                found += [f"{source.family}.cu:{number}: {match[0]}" for match in _CUDA_ONLY.finditer(content)]
        line += section.text.count("\n") + 1
    return tuple(found)
