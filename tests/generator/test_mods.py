"""The common masks and scores against their definitions, written out in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flashsmith.generator import mods
from flashsmith.generator.errors import UsageError
from flashsmith.generator.language import Traced, trace_mask, trace_score
from flashsmith.generator.language.evaluate import evaluate

SHAPES = [(8, 8), (5, 2), (2, 5), (3, 11), (1, 1)]


def dense(traced: Traced, rows: int, keys: int, *, b: int = 0, h: int = 0, score: float = 0.0) -> np.ndarray:
    """The mod for every row and key."""

    def value(q: int, kv: int) -> Any:
        leaves = {"b": b, "h": h, "q_idx": q, "kv_idx": kv, "score": score}
        leaves |= {"seqlen_q": rows, "seqlen_k": keys, "nheads": 2}
        return evaluate(traced.graph, leaves, scalars=traced.scalars, tables=traced.tables)

    return np.array([[value(q, kv) for kv in range(keys)] for q in range(rows)])


def positions(rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """(position of each row, bottom-right, as a column; index of each key)."""
    return np.arange(rows)[:, None] + keys - rows, np.arange(keys)[None, :]


@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_causal_is_bottom_right(rows: int, keys: int) -> None:
    row, key = positions(rows, keys)
    np.testing.assert_array_equal(dense(trace_mask(mods.causal), rows, keys), key <= row)


@pytest.mark.parametrize(("rows", "keys"), SHAPES)
@pytest.mark.parametrize(
    ("left", "right"), [(2, 0), (0, 0), (0, -1), (8, 0), (-3, 0), (-1, 4), (-1, -1), (3, 2), ((1 << 31) - 1, 1 << 40)]
)
def test_windows_are_inclusive_and_negative_is_unlimited(rows: int, keys: int, left: int, right: int) -> None:
    row, key = positions(rows, keys)
    expected = np.ones((rows, keys), dtype=bool)
    if left >= 0:
        expected &= key >= row - left
    if right >= 0:
        expected &= key <= row + right
    np.testing.assert_array_equal(dense(trace_mask(mods.sliding_window(left, right)), rows, keys), expected)


def test_a_window_of_zero_sees_one_key() -> None:
    np.testing.assert_array_equal(dense(trace_mask(mods.sliding_window(0, 0)), 8, 8), np.eye(8, dtype=bool))


def test_the_window_is_a_run_time_value_and_its_sides_are_not() -> None:
    def graph(left: int, right: int) -> Any:
        return trace_mask(mods.sliding_window(left, right)).graph

    assert graph(3, 5) == graph(0, 1 << 40)
    assert len({graph(3, 5), graph(-1, 5), graph(3, -1), graph(-1, -1)}) == 4


@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_prefix_lm(rows: int, keys: int) -> None:
    row, key = positions(rows, keys)
    np.testing.assert_array_equal(dense(trace_mask(mods.prefix_lm(3)), rows, keys), (key < 3) | (key <= row))
    lengths = np.array([1, 4], dtype=np.int32)
    by_item = trace_mask(mods.prefix_lm(lengths))
    for b in (0, 1):
        np.testing.assert_array_equal(dense(by_item, rows, keys, b=b), (key < lengths[b]) | (key <= row))


def test_documents() -> None:
    ids = np.array([[0, 0, 1, 1, 1], [2, 2, 2, 5, 5]], dtype=np.int64)
    for b in (0, 1):
        one = dense(trace_mask(mods.document(ids)), 5, 5, b=b)
        np.testing.assert_array_equal(one, ids[b][:, None] == ids[b][None, :])
    row_ids, key_ids = np.array([1, 7], dtype=np.int32), ids[0].astype(np.int32)
    mixed = dense(trace_mask(mods.document(row_ids, key_ids)), 2, 5)
    np.testing.assert_array_equal(mixed, row_ids[:, None] == key_ids[None, :])


@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_alibi(rows: int, keys: int) -> None:
    row, key = positions(rows, keys)
    slopes = np.array([[0.5, 0.25], [0.125, 1.0]], dtype=np.float32)
    for b in (0, 1):
        for h in (0, 1):
            expected = 3.0 - slopes[b, h] * np.abs(row - key)
            for traced in (trace_score(mods.alibi(slopes)), trace_score(mods.alibi(slopes[b]))):
                np.testing.assert_allclose(dense(traced, rows, keys, b=b, h=h, score=3.0), expected)


@pytest.mark.parametrize("score", [-100.0, -3.0, 0.0, 0.5, 50.0])
def test_softcap(score: float) -> None:
    traced = trace_score(mods.softcap(30.0))
    np.testing.assert_allclose(dense(traced, 1, 1, score=score), [[30.0 * math.tanh(score / 30.0)]], rtol=1e-6)
    assert traced.graph == trace_score(mods.softcap(50.0)).graph


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mods.sliding_window(1.5, 0), ["left", "integer", "1.5"]),
        (lambda: mods.sliding_window(0, None), ["right", "integer", "None"]),
        (lambda: mods.sliding_window(True, 0), ["left", "integer", "True"]),
        (lambda: mods.softcap(0.0), ["from 1.18e-38", "0.0"]),
        (lambda: mods.softcap(-1.0), ["from 1.18e-38", "-1.0"]),
        (lambda: mods.softcap(math.nan), ["from 1.18e-38", "nan"]),
        (lambda: mods.softcap(math.inf), ["to 8.51e+37", "inf"]),
        (lambda: mods.softcap("30"), ["number", "'30'"]),
        (lambda: mods.prefix_lm(1.5), ["n of a prefix", "1.5"]),
        (lambda: mods.prefix_lm(np.zeros((2, 2), dtype=np.int32)), ["n of a prefix", "(2, 2)"]),
        (lambda: mods.alibi(np.zeros((1, 2, 3), dtype=np.float32)), ["slopes", "(1, 2, 3)"]),
        (lambda: mods.alibi([0.5, 0.25]), ["slopes", "list"]),
        (lambda: mods.alibi(np.zeros(2, dtype=np.int32)), ["slopes", "floating point", "int32"]),
        (lambda: mods.document(np.zeros(2, dtype=np.float32)), ["ids_q", "integer", "float32"]),
        (lambda: mods.document(np.zeros(2, dtype=np.int32), 3), ["ids_kv", "int"]),
    ],
)
def test_bad_arguments_are_named(call: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
