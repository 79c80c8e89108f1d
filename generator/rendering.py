"""`render(spec, config, arch)`: from a problem and a choice to the text of a kernel."""

from __future__ import annotations

import re
from typing import Any

from .arch import Arch
from .environment import environment, generator_digest
from .errors import RenderError
from .families import families_for
from .families.base import Family, KernelConfig
from .language.cuda import render_mods
from .source import KernelSource, Section
from .spec import AttentionSpec

__all__ = ["generator_digest", "render"]

MODS_TITLE = f"// ---- Mask and score, traced from Python {'-' * 53}\n\n"
_FUNCTION_NAME = re.compile(r"__forceinline__ [\w ]+?\b(\w+)\(")
_RESIDUE = re.compile(r"\{\{|\}\}|\{%|%\}|[ \t]\n|\n\n\n")


def render(spec: AttentionSpec, config: KernelConfig, arch: Arch, *, family: Family | None = None) -> KernelSource:
    """The kernel that solves `spec` with `config` on `arch`: deterministic to the byte.

    Raises ConfigError where the config is outside the family's space, UnsupportedError where no family fits, and
    RenderError where a template leaves residue (a fault of flashsmith).
    """
    family = family or _family_of(spec, config, arch)
    family.check(spec, config, arch)
    mods = render_mods(spec.mask, spec.score)
    context: dict[str, Any] = {
        "spec": spec,
        "config": config,
        "arch": arch,
        "family": family,
        "entry": family.entry,
        "arguments": family.arguments(spec),
        "facts": {
            "mask": _wrap("none" if spec.mask is None else spec.mask.describe()),
            "score": _wrap("none" if spec.score is None else spec.score.describe()),
            "arch": [f"{arch.name}, family {family.name}"],
            "config": _wrap(str(config)),
        },
        "mask_function": mods.mask_function,
        "score_function": mods.score_function,
        "needs_classify": mods.needs_classify,
        "j_next": "j_next" if mods.needs_classify else "j - 1",
        **family.render_context(spec, config, arch),
    }
    texts = {name: environment().get_template(path).render(context) for name, path in family.sections}
    per_score: tuple[str, ...] = (mods.mask_function, mods.score_function)
    if family.branch_free_mods:
        per_score = tuple(text.replace("&&", "&").replace("||", "|") for text in per_score)
    functions = (*per_score, mods.kv_range_function, mods.classify_function)
    mod_text = "\n".join(text.strip("\n") + "\n" for text in functions if text)
    if mod_text:
        texts["mods"] = MODS_TITLE + mod_text
    texts = {name: _align_comments(text) for name, text in texts.items()}
    texts["primitives"] = _used_functions(texts["primitives"], texts.get("mods", "") + texts["kernel"])
    order = ("header", "types", "primitives", "mods", "kernel")
    sections = tuple(Section(name, texts[name]) for name in order if name in texts)
    source = KernelSource(
        entry=family.entry,
        family=family.name,
        spec=spec,
        config=config,
        arch=arch,
        sections=sections,
        arguments=family.arguments(spec),
    )
    _check_residue(source.text)
    return source


def _family_of(spec: AttentionSpec, config: KernelConfig, arch: Arch) -> Family:
    for family in families_for(spec, arch):
        if isinstance(config, family.config_type):
            return family
    raise RenderError(f"No kernel family for {spec} on {arch} takes a {type(config).__name__}.")


def _wrap(text: str, *, width: int = 84) -> list[str]:
    """`text` in lines of at most `width` columns, broken at spaces."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _used_functions(primitives: str, user_text: str) -> str:
    """The primitives that `user_text` calls, directly or through another primitive; the rest is left out."""
    title, *chunks = primitives.strip("\n").split("\n\n")
    by_name: dict[str, str] = {}
    for chunk in chunks:
        match = _FUNCTION_NAME.search(chunk)
        if match is None:
            raise RenderError(f"No function found in this part of the primitives: {chunk[:80]!r}")
        by_name[match[1]] = chunk
    used: set[str] = set()
    frontier = user_text
    while frontier:
        called = {name for name in re.findall(r"\b\w+\b", frontier) if name in by_name} - used
        used |= called
        frontier = "\n".join(by_name[name] for name in called)
    return "\n\n".join([title, *(text for name, text in by_name.items() if name in used)]) + "\n"


_TRAILING_COMMENT = re.compile(r"^(?P<code>\s*[^/\s].*?) +(?P<comment>// .*)$")


def _align_comments(text: str) -> str:
    """`text` with the trailing comments of neighbouring lines in one column, as clang-format sets them."""
    lines = text.split("\n")
    matches = [_TRAILING_COMMENT.match(line) for line in lines]
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and matches[end] is not None:
            end += 1
        block = [match for match in matches[start:end] if match is not None]
        if block:
            column = max(len(match["code"]) for match in block) + 2
            lines[start:end] = [match["code"].ljust(column) + match["comment"] for match in block]
        start = end + 1
    return "\n".join(lines)


def _check_residue(text: str) -> None:
    match = _RESIDUE.search(text)
    if match is not None:
        line = text.count("\n", 0, match.start()) + 1
        raise RenderError(f"Residue {match[0]!r} in the generated text, line {line}.")
