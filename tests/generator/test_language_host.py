"""The emitted CUDA text, compiled for the host, against plain Python: masks, key ranges, tile classes and scores."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from helpers_language import HostMods, MaskWriter

from flashsmith.generator import mods
from flashsmith.generator.language import (
    Traced,
    abs,
    compose_scores,
    exp,
    log,
    maximum,
    minimum,
    seqlen_k,
    seqlen_q,
    sqrt,
    tanh,
    trace_mask,
    trace_score,
    where,
)
from flashsmith.generator.language.bounds import kv_bounds
from flashsmith.generator.language.evaluate import evaluate
from flashsmith.generator.language.interval import classify_tile

B, H, ROWS, KEYS = 1, 2, 9, 21
NHEADS = 3
CLASSES = ("empty", "mixed", "full")
#: Row blocks and key tiles, (first, last) inclusive, aligned and not.
ROW_BLOCKS = [(0, 8), (0, 3), (4, 7), (8, 8), (2, 5), (3, 3)]
KEY_TILES = [(0, 20), (0, 7), (8, 15), (16, 20), (5, 5), (3, 11), (20, 20)]


def check_ranges(seen: np.ndarray, ends: tuple[int, ...], first: int, last: int) -> None:
    """`ends` holds every visible key, and its full part nothing else."""
    begin, end, full_begin, full_end = ends
    assert 0 <= begin <= full_begin <= full_end <= end <= seen.shape[1]
    rows = seen[first : last + 1]
    outside = np.ones(seen.shape[1], dtype=bool)
    outside[begin:end] = False
    assert not rows[:, outside].any()
    assert rows[:, full_begin:full_end].all()


@pytest.mark.parametrize("large", [False, True])
def test_random_masks(large: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    masks = [MaskWriter(Random(seed), large=large).mask() for seed in range(120)]
    traced = [trace_mask(mask.function()) for mask in masks]
    host = HostMods([(t, None) for t in traced], tmp_path)
    decided = 0
    for i, (mask, one) in enumerate(zip(masks, traced, strict=True)):
        oracle = mask.oracle(ROWS, KEYS, NHEADS)
        expected = np.array([[oracle(B, H, q, k) for k in range(KEYS)] for q in range(ROWS)])
        args = host.pack(i, seqlen_q=ROWS, seqlen_k=KEYS, nheads=NHEADS)
        np.testing.assert_array_equal(host.seen(i, args, B, H, ROWS, KEYS), expected, err_msg=mask.traced)
        for first, last in ROW_BLOCKS:
            ends = host.kv_range(i, args, B, H, first, last)
            check_ranges(expected, ends, first, last)
            same = kv_bounds(one.graph).values(
                b=B, h=H, q=(first, last), seqlen_q=ROWS, seqlen_k=KEYS, nheads=NHEADS,
                scalars=one.scalars, tables=one.tables,
            )  # fmt: skip
            assert ends == same, mask.traced
            for tile in KEY_TILES:
                found = host.classify(i, args, B, H, (first, last), tile)
                part = expected[first : last + 1, tile[0] : tile[1] + 1]
                assert found != 0 or not part.any(), mask.traced
                assert found != 2 or part.all(), mask.traced
                python = classify_tile(
                    one.graph, b=B, h=H, q=(first, last), kv=tile, seqlen_q=ROWS, seqlen_k=KEYS, nheads=NHEADS,
                    scalars=one.scalars, tables=one.tables,
                )  # fmt: skip
                assert found in (-1, CLASSES.index(python))
                decided += found in (0, 2)
    assert decided > 1000  # the classes are not all "mixed"
    assert "runtime error" not in capfd.readouterr().err


# ---- Scores ----------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)
bias = RANDOM.standard_normal((3, 11)).astype(np.float32)
half_bias = RANDOM.standard_normal(7).astype(np.float16)
shown = RANDOM.integers(0, 2, (9, 21)).astype(bool)
scale, shift, far = 0.37, 3, 1 << 40

SCORES: dict[str, Any] = {
    "softcap": mods.softcap(3.0),
    "alibi": mods.alibi(np.array([0.5, 0.25, 0.125], dtype=np.float32)),
    "alibi by item": mods.alibi(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)),
    "relative bias": lambda s, b, h, q, kv: s + bias[h, q - kv + 5],
    "fp16 table": lambda s, b, h, q, kv: s * half_bias[kv % 7],
    "bool table": lambda s, b, h, q, kv: where(shown[q, kv], s, -math.inf),
    "hidden by a score": lambda s, b, h, q, kv: where(kv <= q + shift, s, -math.inf),
    "functions": lambda s, b, h, q, kv: tanh(s) + exp(-abs(s)) - log(sqrt(s * s + 1.0)),
    "bounds": lambda s, b, h, q, kv: minimum(maximum(s, -0.5), 1e-3) / (q + 1) + 1e20 * scale,
    "64 bits": lambda s, b, h, q, kv: s + (far - (far - kv)) * scale,
    "integers": lambda s, b, h, q, kv: s + ((q - kv) // 3) % 5 - (kv << 2) + (q >> 1) + (q & 3) - (~kv ^ 5),
    "sizes": lambda s, b, h, q, kv: s * (seqlen_k - seqlen_q) / seqlen_k,
    "nothing": lambda s, b, h, q, kv: s,
}


def test_scores(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    traced = [trace_score(score) for score in SCORES.values()]
    traced.append(compose_scores(SCORES["softcap"], SCORES["alibi"], SCORES["relative bias"]))
    host = HostMods([(None, t) for t in traced], tmp_path)
    for i, one in enumerate(traced):
        args = host.pack(i, seqlen_q=ROWS, seqlen_k=KEYS, nheads=NHEADS)
        for q, kv, score in ((0, 0, 0.5), (3, 20, -2.25), (8, 1, 40.0), (4, 4, -0.0)):
            leaves = {"score": score, "b": B, "h": H, "q_idx": q, "kv_idx": kv}
            leaves |= {"seqlen_q": ROWS, "seqlen_k": KEYS, "nheads": NHEADS}
            expected = evaluate(one.graph, leaves, scalars=one.scalars, tables=one.tables)
            found = host.score(i, args, score, B, H, q, kv)
            assert found == pytest.approx(expected, rel=3e-6, abs=3e-6), one.graph.describe()
    assert "runtime error" not in capfd.readouterr().err


def test_bf16_tables(tmp_path: Path) -> None:
    """numpy has no bfloat16: the slot is made by hand over the upper halves of fp32 numbers."""
    from flashsmith.generator.language import Graph, TableSlot
    from flashsmith.generator.language.node import leaf, make

    values = np.array([1.5, -2.0, 0.0, 1e30, -math.inf], dtype=np.float32)
    table = (values.view(np.uint32) >> 16).astype(np.uint16)
    graph = Graph("score", make("load", (leaf("kv_idx"),), TableSlot("t", "bf16", 1)))
    host = HostMods([(None, Traced(graph, (), (table,)))], tmp_path)
    args = host.pack(0, seqlen_q=1, seqlen_k=5, nheads=1)
    found = [host.score(0, args, 0.0, 0, 0, 0, kv) for kv in range(5)]
    assert found == [1.5, -2.0, 0.0, pytest.approx(1e30, rel=1e-2), -math.inf]


# ---- Corners ---------------------------------------------------------------------------------


def test_padded_rows_and_keys_read_inside_the_tables(tmp_path: Path) -> None:
    """A tile's rows and keys beyond the sequences, and indices that leave a table, read its nearest element."""
    ids = np.arange(4, dtype=np.int32)
    offsets = np.arange(3, dtype=np.int64)
    masks = [
        mods.document(ids),
        lambda b, h, q, kv: offsets[q - kv] == 0,
        lambda b, h, q, kv: offsets[(q - kv) * 1000000000000] == 2,
        lambda b, h, q, kv: ids[2] + ids[h] == 2 + q - q,
    ]
    traced = [trace_mask(mask) for mask in masks]
    guarded = [Traced(t.graph, t.scalars, tuple(surrounded(table) for table in t.tables)) for t in traced]
    host = HostMods([(t, None) for t in guarded], tmp_path)
    for i, one in enumerate(traced):
        args = host.pack(i, seqlen_q=4, seqlen_k=4, nheads=2)
        seen = host.seen(i, args, 0, 0, 9, 13)  # 5 rows and 9 keys beyond the sequences

        def value(q: int, kv: int, one: Traced = one) -> bool:
            leaves = {"b": 0, "h": 0, "q_idx": q, "kv_idx": kv, "seqlen_q": 4, "seqlen_k": 4, "nheads": 2}
            return bool(evaluate(one.graph, leaves, scalars=one.scalars, tables=one.tables))

        np.testing.assert_array_equal(seen, [[value(q, kv) for kv in range(13)] for q in range(9)])


def surrounded(table: np.ndarray) -> np.ndarray:
    """A copy of a one-dimensional `table` with other numbers on both sides in memory."""
    wide = np.full(3 * len(table), -77, dtype=table.dtype)
    wide[len(table) : 2 * len(table)] = table
    return wide[len(table) : 2 * len(table)]


def test_strided_tables(tmp_path: Path) -> None:
    base = np.arange(60, dtype=np.int32).reshape(5, 12)
    views = [base.T, base[::-1, ::2], np.broadcast_to(base[:, :1], (5, 6))]

    def mask(table: np.ndarray) -> Traced:
        return trace_mask(lambda b, h, q, kv: table[q, kv] % 2 == 1)

    traced = [mask(view) for view in views]
    host = HostMods([(t, None) for t in traced], tmp_path)
    for i, view in enumerate(views):
        rows, keys = view.shape
        args = host.pack(i, seqlen_q=rows, seqlen_k=keys, nheads=1)
        np.testing.assert_array_equal(host.seen(i, args, 0, 0, rows, keys), view % 2 == 1)


SIZE = (1 << 29) - 1024


@pytest.mark.parametrize("name", ["causal", "window", "wide window", "user window", "product"])
def test_the_largest_lengths_do_not_overflow(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    widest, longest = (1 << 31) - 1, (1 << 63) - (1 << 40)
    masks: dict[str, Any] = {
        "causal": mods.causal,
        "window": mods.sliding_window(1000, 0),
        "wide window": mods.sliding_window(widest, widest),
        "user window": lambda b, h, q, kv: (kv + widest >= q + seqlen_k) & (q - kv <= longest),
        "product": lambda b, h, q, kv: q * seqlen_k + kv <= seqlen_q * seqlen_k - 5,
    }
    traced = trace_mask(masks[name])
    host = HostMods([(traced, None)], tmp_path)
    args = host.pack(0, seqlen_q=SIZE, seqlen_k=SIZE, nheads=1)
    for first in (0, SIZE // 2, SIZE - 128):
        rows = (first, first + 127)
        expected = kv_bounds(traced.graph).values(
            b=0, h=0, q=rows, seqlen_q=SIZE, seqlen_k=SIZE, nheads=1, scalars=traced.scalars
        )
        assert host.kv_range(0, args, 0, 0, *rows) == expected
        for q in rows:
            for kv in (0, 1000, SIZE // 2, SIZE - 1):
                leaves = {"b": 0, "h": 0, "q_idx": q, "kv_idx": kv, "seqlen_q": SIZE, "seqlen_k": SIZE, "nheads": 1}
                seen = bool(evaluate(traced.graph, leaves, scalars=traced.scalars))
                assert host.sees(0, args, 0, 0, q, kv) == seen, (q, kv)
    assert "runtime error" not in capfd.readouterr().err
