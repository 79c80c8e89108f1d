"""Tile classes and key ranges in Python: never wrong for random masks, exact for the common ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from helpers_language import MaskWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsmith.generator import mods
from flashsmith.generator.language import Traced, and_masks, or_masks, seqlen_k, seqlen_q, trace_mask, where
from flashsmith.generator.language.bounds import kv_bounds
from flashsmith.generator.language.evaluate import evaluate
from flashsmith.generator.language.interval import TileClass, classify_tile


def dense(traced: Traced, seqlen_q: int, seqlen_k: int, h: int = 0) -> np.ndarray:
    """The whole mask, row by row."""
    sizes = {"b": 0, "h": h, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "nheads": 4}

    def seen(q: int, kv: int) -> bool:
        leaves = {**sizes, "q_idx": q, "kv_idx": kv}
        return bool(evaluate(traced.graph, leaves, scalars=traced.scalars, tables=traced.tables))

    return np.array([[seen(q, kv) for kv in range(seqlen_k)] for q in range(seqlen_q)]).reshape(seqlen_q, seqlen_k)


@st.composite
def tiles(draw: st.DrawFn) -> tuple[Random, tuple[int, int], tuple[int, int]]:
    random = draw(st.randoms(use_true_random=False))
    q = sorted((draw(st.integers(0, 7)), draw(st.integers(0, 7))))
    kv = sorted((draw(st.integers(0, 15)), draw(st.integers(0, 15))))
    return random, (q[0], q[1]), (kv[0], kv[1])


@given(tiles())
@settings(max_examples=1500)
def test_random_tiles_are_never_classified_wrongly(tile: tuple[Random, tuple[int, int], tuple[int, int]]) -> None:
    random, q, kv = tile
    mask = MaskWriter(random, large=random.random() < 0.2).mask()
    traced = trace_mask(mask.function())
    oracle = mask.oracle(8, 16, 3)
    part = np.array([[oracle(1, 2, i, j) for j in range(kv[0], kv[1] + 1)] for i in range(q[0], q[1] + 1)])
    for tables in (traced.tables, None):
        found = classify_tile(
            traced.graph, b=1, h=2, q=q, kv=kv, seqlen_q=8, seqlen_k=16, nheads=3,
            scalars=traced.scalars, tables=tables,
        )  # fmt: skip
        assert found != "empty" or not part.any(), mask.traced
        assert found != "full" or part.all(), mask.traced


@given(tiles())
@settings(max_examples=600)
def test_random_key_ranges_hold_every_visible_key(tile: tuple[Random, tuple[int, int], tuple[int, int]]) -> None:
    random, q, _ = tile
    mask = MaskWriter(random, large=random.random() < 0.2).mask()
    traced = trace_mask(mask.function())
    oracle = mask.oracle(8, 16, 3)
    begin, end, full_begin, full_end = kv_bounds(traced.graph).values(
        b=1, h=2, q=q, seqlen_q=8, seqlen_k=16, nheads=3, scalars=traced.scalars, tables=traced.tables
    )
    assert 0 <= begin <= full_begin <= full_end <= end <= 16
    for kv in range(16):
        column = [oracle(1, 2, i, kv) for i in range(q[0], q[1] + 1)]
        assert begin <= kv < end or not any(column), mask.traced
        assert not full_begin <= kv < full_end or all(column), mask.traced


W, N = 5, 4
COMMON: dict[str, Callable[[], Traced]] = {
    "causal": lambda: trace_mask(mods.causal),
    "window": lambda: trace_mask(mods.sliding_window(W, 3)),
    "window-left": lambda: trace_mask(mods.sliding_window(W, -1)),
    "window-right": lambda: trace_mask(mods.sliding_window(-1, 2)),
    "causal-window": lambda: and_masks(mods.causal, mods.sliding_window(W, W)),
    "diagonal": lambda: trace_mask(mods.sliding_window(0, 0)),
    "prefix": lambda: trace_mask(mods.prefix_lm(N)),
    "prefix-table": lambda: trace_mask(mods.prefix_lm(np.array([6], dtype=np.int32))),
    "chunks": lambda: trace_mask(lambda b, h, q, kv: q // 4 == kv // 4),
    "causal-chunks": lambda: and_masks(lambda b, h, q, kv: q // 4 == kv // 4, lambda b, h, q, kv: q >= kv),
    "band": lambda: trace_mask(lambda b, h, q, kv: abs(q - kv) <= W),
    "per-head": lambda: trace_mask(lambda b, h, q, kv: where(h < 2, kv <= q, abs(q - kv) <= W)),
    "one-batch-item": lambda: trace_mask(lambda b, h, q, kv: (b == 0) & (kv <= q + (seqlen_k - seqlen_q))),
    "anti-causal": lambda: trace_mask(lambda b, h, q, kv: ~(kv <= q)),
    "everything": lambda: trace_mask(mods.everything),
    "nothing": lambda: trace_mask(lambda b, h, q, kv: False),
}


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (11, 24), (24, 11), (1, 17), (16, 1)])
def test_common_masks_visit_no_empty_tile_and_mask_no_full_one(name: str, rows: int, keys: int) -> None:
    traced = COMMON[name]()
    bounds = kv_bounds(traced.graph)
    assert bounds.exact
    seen = dense(traced, rows, keys)
    height, width = 4, 4
    for first in range(0, rows, height):
        last = min(first + height, rows) - 1
        begin, end, full_begin, full_end = bounds.values(
            b=0, h=0, q=(first, last), seqlen_q=rows, seqlen_k=keys, nheads=4,
            scalars=traced.scalars, tables=traced.tables,
        )  # fmt: skip
        for kv in range(0, keys, width):
            part = seen[first : last + 1, kv : kv + width]
            assert (begin < min(kv + width, end) and kv < end) == part.any(), f"rows from {first}, keys from {kv}"
            is_full = full_begin <= kv and kv + part.shape[1] <= full_end
            assert is_full == bool(part.all()), f"rows from {first}, keys from {kv}"


def test_the_other_heads_of_a_mask_chosen_by_head() -> None:
    traced = COMMON["per-head"]()
    for h, first_key in ((0, 0), (3, 8 - W)):
        begin, end, _, _ = kv_bounds(traced.graph).values(
            b=0, h=h, q=(8, 11), seqlen_q=16, seqlen_k=32, nheads=4, scalars=traced.scalars
        )
        assert (begin, end) == (first_key, 12 + (W if h else 0))


def test_masks_with_holes_are_not_exact_and_tiles_tell_them() -> None:
    sink_and_window = or_masks(lambda b, h, q, kv: kv < 4, mods.sliding_window(W, 0))
    graph = sink_and_window.graph
    assert not kv_bounds(graph).exact

    def found(kv: tuple[int, int]) -> str:
        return classify_tile(
            graph, b=0, h=0, q=(32, 33), kv=kv, seqlen_q=64, seqlen_k=64, nheads=1, scalars=sink_and_window.scalars
        )

    assert [found(kv) for kv in ((0, 3), (0, 7), (8, 15), (28, 32), (24, 31), (40, 47))] == [
        "full", "mixed", "empty", "full", "mixed", "empty",
    ]  # fmt: skip


def test_a_choice_is_exact_only_if_both_branches_are() -> None:
    def sink(q: Any, kv: Any) -> Any:
        return (kv < 4) | (q - kv <= W)

    graph = trace_mask(lambda b, h, q, kv: where(h < 2, sink(q, kv), kv <= q)).graph
    assert not kv_bounds(graph).exact
    graph = trace_mask(lambda b, h, q, kv: where(h < 2, kv <= q, sink(q, kv) & (kv <= q))).graph
    assert not kv_bounds(graph).exact


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (lambda b, h, q, kv: kv & 6 == 7, "empty"),  # at most 6
        (lambda b, h, q, kv: kv & 6 == 6, "mixed"),
        (lambda b, h, q, kv: kv & 7 == 3, "empty"),  # within one period of 8
        (lambda b, h, q, kv: kv & 7 == 5, "full"),
    ],
)
def test_masked_bits(mask: Any, expected: str) -> None:
    graph = trace_mask(mask).graph
    assert classify_tile(graph, b=0, h=0, q=(0, 0), kv=(5, 5), seqlen_q=8, seqlen_k=8, nheads=1) == expected


def test_dilated_masks_are_classified_within_one_period() -> None:
    graph = trace_mask(lambda b, h, q, kv: (q - kv) % 64 < 8).graph

    def found(q: tuple[int, int], kv: tuple[int, int]) -> str:
        return classify_tile(graph, b=0, h=0, q=q, kv=kv, seqlen_q=256, seqlen_k=256, nheads=1)

    assert found((64, 66), (62, 64)) == "full"
    assert found((100, 103), (68, 71)) == "empty"
    assert found((64, 127), (0, 63)) == "mixed"


def test_table_bounds_decide_documents() -> None:
    mask = trace_mask(lambda b, h, q, kv: np_ids_q[q] == np_ids_kv[kv])
    graph = mask.graph

    def found(bounds: dict[str, tuple[int, int]] | None) -> TileClass:
        return classify_tile(
            graph, b=0, h=0, q=(0, 3), kv=(0, 3), seqlen_q=8, seqlen_k=8, nheads=1, table_bounds=bounds
        )

    assert found(None) == "mixed"
    assert found({"np_ids_q": (1, 2), "np_ids_kv": (3, 4)}) == "empty"
    assert found({"np_ids_q": (1, 1), "np_ids_kv": (1, 1)}) == "full"
    assert found({"np_ids_q": (1, 2), "np_ids_kv": (2, 3)}) == "mixed"


np_ids_q = np.zeros(8, dtype=np.int32)
np_ids_kv = np.zeros(8, dtype=np.int32)


def test_values_that_may_wrap_have_no_interval() -> None:
    """q_idx * far * far leaves 64 bits: what the kernel's product is nobody knows, so no tile is decided by it."""
    far = 1 << 40
    traced = trace_mask(lambda b, h, q, kv: (q + kv) * far * far >= 0)
    found = classify_tile(
        traced.graph, b=0, h=0, q=(1, 2), kv=(1, 2), seqlen_q=8, seqlen_k=8, nheads=1, scalars=traced.scalars
    )
    assert found == "mixed"


def test_unknown_parts_of_a_conjunction_leave_the_known_bounds() -> None:
    packed = and_masks(mods.causal, mods.document(np_ids_q))
    bounds = kv_bounds(packed.graph)
    values = bounds.values(b=0, h=0, q=(2, 3), seqlen_q=8, seqlen_k=8, nheads=1, tables=packed.tables)
    assert values == (0, 4, 0, 0)
    # Intervals know no more of the ids than the range does, so no tile needs a second look.
    assert bounds.exact


@pytest.mark.parametrize("size", [1 << 20, (1 << 29) - 1024])
@pytest.mark.parametrize(("left", "right"), [((1 << 31) - 1, 0), (1 << 62, 1 << 62), (0, (1 << 31) - 1), (7, 9)])
def test_windows_near_the_largest_integers_do_not_wrap(size: int, left: int, right: int) -> None:
    traced = trace_mask(mods.sliding_window(left, right))
    last = size - 1
    begin, end, full_begin, full_end = kv_bounds(traced.graph).values(
        b=0, h=0, q=(last - 127, last), seqlen_q=size, seqlen_k=size, nheads=1, scalars=traced.scalars
    )
    assert begin == max(0, last - 127 - left) and end == min(size, last + 1 + right)
    assert full_begin == max(0, last - left)
    assert full_end == max(full_begin, min(size, last - 127 + 1 + right))
