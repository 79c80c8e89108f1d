"""Short names for tables: masks, scores and configs in a few characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

#: A mask or score without a name of its own is cut to this many characters.
MAX_EXPRESSION = 28
#: A config's numbers are these letters with the number; its words and flags are cut short.
LETTERS = {
    "num_warpgroups": "wg",
    "num_warps": "w",
    "B_r": "r",
    "B_c": "c",
    "num_stages": "s",
    "q_stages": "q",
    "min_blocks": "b",
}
WORDS = {
    "q_in_registers": "qreg",
    "pingpong": "pp",
    "pack_gqa": "pack",
    "optimistic": "opt",
    "longest_first": "longest",
    "registers": "",  # P_ij, as usual
    "shared": "psh",
}


def short_config(config: Mapping[str, Any]) -> str:
    """A config in about 30 characters: "128x48 w4 s2 opt longest b1", "wg2 c128 s2 q2 opt dynamic"."""
    parts = []
    for name, value in config.items():
        if name == "B_r" and "B_c" in config:
            parts.append(f"{value}x{config['B_c']}")
        elif name == "B_c" and "B_r" in config:
            continue
        elif isinstance(value, bool):
            parts += [WORDS.get(name, name)] if value else []
        elif isinstance(value, int):
            parts.append(f"{LETTERS.get(name, name + '=')}{value}")
        else:
            parts.append(WORDS.get(value, value))
    return " ".join(part for part in parts if part)


def short_problem(words: str, values: Mapping[str, int | float] | None = None, *, op: bool = True) -> str:
    """A spec in words with its mask and score by name: "forward bf16 d128 window(128,0)".

    `words` is `str(spec)`, `values` the numbers that mask and score captured. Without `op`, "forward" is left out.
    """
    for kind, text in _expressions(words):
        template = _names().get((kind, text))
        name = _cut(text) if template is None else _filled(template, values or {})
        words = words.replace(f"{kind}[{text}]", f"{kind}[{name}]" if template is None else name, 1)
    return words if op else words.removeprefix("forward ")


def _expressions(words: str) -> Iterator[tuple[str, str]]:
    """("mask", its text) and ("score", its text) of a spec in words; brackets within the text are whole."""
    for kind in ("mask", "score"):
        start = words.find(f" {kind}[")
        if start < 0:
            continue
        begin = start + len(kind) + 2
        depth = 1
        for place in range(begin, len(words)):
            depth += {"[": 1, "]": -1}.get(words[place], 0)
            if depth == 0:
                yield kind, words[begin:place]
                break


def _cut(text: str) -> str:
    return text if len(text) <= MAX_EXPRESSION else text[: MAX_EXPRESSION - 3] + "..."


def _filled(template: str, values: Mapping[str, int | float]) -> str:
    for name in ("left", "right", "n", "softcap"):
        if name in values:
            template = template.replace(f"<{name}>", f"{values[name]:g}")
    return template.replace("(<softcap>)", "").replace("<", "").replace(">", "")


@cache
def _names() -> dict[tuple[str, str], str]:
    """The library's own masks and scores, by their text; <left> stands for a captured number."""
    import numpy as np

    from ...generator import mods
    from ...generator.language import Graph, compose_scores, trace_mask, trace_score
    from ..problem import problem_of

    names: dict[tuple[str, str], str] = {}

    def add(graph: Graph | None, name: str) -> None:
        if graph is not None:
            names[graph.kind, graph.describe()] = name

    for window, name in (
        ((-1, 0), "causal"),
        ((1, 0), "window(<left>,0)"),
        ((1, 1), "window(<left>,<right>)"),
        ((-1, 1), "window(-1,<right>)"),
        ((1, -1), "window(<left>,-1)"),
    ):
        add(problem_of(dtype="bf16", head_dim=64, window_size=window).spec.mask, name)
    one, two = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    add(trace_mask(mods.prefix_lm(1)).graph, "prefix(<n>)")
    add(trace_mask(mods.prefix_lm(one)).graph, "prefix(per batch)")
    for ids in (one, two):
        add(trace_mask(mods.document(ids)).graph, "document")
        add(trace_mask(mods.document(ids, ids.copy())).graph, "document")
    softcap = trace_score(mods.softcap(1.0))
    add(softcap.graph, "softcap(<softcap>)")
    for slopes in (one.astype(np.float32), two.astype(np.float32)):
        alibi = trace_score(mods.alibi(slopes))
        add(alibi.graph, "alibi")
        add(compose_scores(softcap, alibi).graph, "softcap(<softcap>)+alibi")
    return names
