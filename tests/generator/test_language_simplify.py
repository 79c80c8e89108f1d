"""Simplification: the value stays, the form becomes the one that is cheap and tells key ranges."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from helpers_language import MaskWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsmith.generator.language import (
    Graph,
    abs,
    maximum,
    minimum,
    seqlen_k,
    seqlen_q,
    simplify,
    trace_mask,
    trace_score,
    where,
)
from flashsmith.generator.language.evaluate import evaluate
from flashsmith.generator.language.node import const, leaf, make
from flashsmith.generator.language.ops import PYTHON_FUNCTIONS
from flashsmith.generator.language.ranges import range_of
from flashsmith.generator.language.rules import build

Q, KV = leaf("q_idx"), leaf("kv_idx")
w, n = 3, 4


@given(st.randoms(use_true_random=False))
@settings(max_examples=400)
def test_simplified_masks_keep_their_value(random: Random) -> None:
    mask = MaskWriter(random, large=random.random() < 0.3).mask()
    traced = trace_mask(mask.function())
    oracle = mask.oracle(7, 11, 2)
    for q in (0, 3, 6):
        for kv in range(0, 11, 2):
            leaves = {"b": 1, "h": 0, "q_idx": q, "kv_idx": kv, "seqlen_q": 7, "seqlen_k": 11, "nheads": 2}
            value = evaluate(traced.graph, leaves, scalars=traced.scalars, tables=traced.tables)
            assert value == oracle(1, 0, q, kv), f"{mask.traced} became {traced.graph.describe()}"


@given(st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_simplifying_again_changes_nothing(random: Random) -> None:
    graph = trace_mask(MaskWriter(random).mask(depth=4).function()).graph
    assert simplify(graph) == graph


_OPS = ["add", "sub", "mul", "floordiv", "mod", "min", "max", "neg", "abs", "bitand", "bitor", "bitxor", "bitnot"]
_ENDS = st.tuples(st.integers(-12, 12), st.integers(-12, 12)).map(sorted)


@given(st.sampled_from([*_OPS, "shl", "shr"]), _ENDS, _ENDS)
@settings(max_examples=500)
def test_ranges_hold_every_value(op: str, a: list[int], b: list[int]) -> None:
    if op in ("shl", "shr"):
        b = [max(0, b[0]), max(0, b[1])]
    unary = op in ("neg", "abs", "bitnot")
    low, high = range_of(op, ((a[0], a[1]),) if unary else ((a[0], a[1]), (b[0], b[1])))
    for x in range(a[0], a[1] + 1):
        for y in range(b[0], b[1] + 1):
            value = PYTHON_FUNCTIONS[op](*((x,) if unary else (x, y)))
            assert low <= value <= high


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (lambda b, h, q, kv: q >= kv, "kv_idx <= q_idx"),
        (lambda b, h, q, kv: q - kv >= 0, "kv_idx <= q_idx"),
        (lambda b, h, q, kv: q - kv <= w, "q_idx - w <= kv_idx"),
        (lambda b, h, q, kv: kv + (seqlen_q - seqlen_k) - q < w, "kv_idx < w + q_idx - (seqlen_q - seqlen_k)"),
        (lambda b, h, q, kv: -kv < -q, "q_idx < kv_idx"),
        (lambda b, h, q, kv: kv < q + 1, "kv_idx <= q_idx"),
        (lambda b, h, q, kv: kv - 1 < q, "kv_idx <= q_idx"),
        (lambda b, h, q, kv: ~(kv > q), "kv_idx <= q_idx"),
        (lambda b, h, q, kv: ~((kv > q) | (kv < w)), "(kv_idx <= q_idx) & (w <= kv_idx)"),
        (lambda b, h, q, kv: abs(q - kv) <= w, "(kv_idx <= q_idx + w) & (q_idx - w <= kv_idx)"),
        (lambda b, h, q, kv: abs(q - kv) > w, "(q_idx + w < kv_idx) | (kv_idx < q_idx - w)"),
        (lambda b, h, q, kv: kv // 4 <= q // 4, "kv_idx < q_idx // 4 * 4 + 4"),
        (lambda b, h, q, kv: kv // 4 == 2, "(8 <= kv_idx) & (kv_idx < 12)"),
        (lambda b, h, q, kv: (kv >= 0) & (q >= kv), "kv_idx <= q_idx"),
        (lambda b, h, q, kv: (q >= kv) & (q >= kv), "kv_idx <= q_idx"),
        (lambda b, h, q, kv: (q >= kv) | ~(q >= kv), "True"),
        (lambda b, h, q, kv: (q >= kv) & ~(q >= kv), "False"),
        (lambda b, h, q, kv: (q >= kv) ^ True, "q_idx < kv_idx"),
        (lambda b, h, q, kv: where(q >= kv, True, False), "kv_idx <= q_idx"),
        (lambda b, h, q, kv: where(q >= kv, b == 0, False), "(kv_idx <= q_idx) & (b == 0)"),
        (lambda b, h, q, kv: where(q < w, kv < w, kv < w), "kv_idx < w"),
        (lambda b, h, q, kv: kv < minimum(maximum(q, 0), 1 << 30), "kv_idx < q_idx"),
        (lambda b, h, q, kv: kv < (q + 1 + 2 - 3) * 1 + 0 * h, "kv_idx < q_idx"),
        (lambda b, h, q, kv: kv < (q << 3) % 1 + (q >> 0), "kv_idx < q_idx"),
    ],
)
def test_forms_of_masks(mask: Any, text: str) -> None:
    assert trace_mask(mask).graph.describe() == text


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (lambda s, b, h, q, kv: s * 1.0 + 0.0, "score"),
        (lambda s, b, h, q, kv: s / 4.0, "score * 0.25"),
        (lambda s, b, h, q, kv: s / 3.0, "score / 3.0"),
        (lambda s, b, h, q, kv: s * 0.0, "score * 0.0"),
        (lambda s, b, h, q, kv: s + (1.0 + 2.0), "score + 3.0"),
        (lambda s, b, h, q, kv: s * 0.1, "score * 0.1"),
        (lambda s, b, h, q, kv: where(q >= kv, s, -float("inf")), "where(kv_idx <= q_idx, score, -inf)"),
    ],
)
def test_forms_of_scores(score: Any, text: str) -> None:
    assert trace_score(score).graph.describe() == text


def test_no_term_moves_where_its_sum_would_leave_32_bits() -> None:
    far = 1 << 40
    graph = trace_mask(lambda b, h, q, kv: kv + far >= q).graph
    assert graph.describe() == "q_idx <= kv_idx + far"


def test_nan_keeps_comparisons_of_fp32_apart() -> None:
    score = leaf("score")
    less = build("lt", score, const(1.0))
    assert build("not", less).op == "not"
    assert build("or", less, build("le", const(1.0), score)).op == "or"
    assert build("lt", score, score).op == "lt"


def test_rules_keep_constants_at_the_end() -> None:
    total = build("sub", build("add", const(2), Q), build("add", KV, const(5)))
    assert total is make("sub", (make("sub", (Q, KV)), const(3)))
    assert build("add", total, const(3)) is make("sub", (Q, KV))


def test_folding_stops_at_64_bits() -> None:
    big = const((1 << 63) - 1)
    assert build("add", big, big).op == "add"
    assert build("mul", big, const(-1)).value == -((1 << 63) - 1)
    least = const(-(1 << 63))
    for op in ("add", "sub"):
        assert build(op, Q, least) is make(op, (Q, least))
        assert build(op, build("add", Q, big), build("sub", KV, big)).range[0] >= -(1 << 63)
        assert build("lt", build(op, Q, big), build("sub", KV, big)).dtype == "bool"
    assert build("neg", least).op == "neg"


def test_graph_roots_have_the_right_type() -> None:
    from flashsmith.generator.errors import SpecError

    for kind, root in (("mask", Q), ("score", Q), ("mask", const(1.0)), ("other", const(True))):
        with pytest.raises(SpecError):
            Graph(kind, root)
    with pytest.raises(SpecError, match="must not use the score"):
        Graph("mask", build("lt", leaf("score"), const(0.0)))


@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!="])
@pytest.mark.parametrize("divisor", ["3", "-3", "below", "maximum(above, 1)"])
@pytest.mark.parametrize("bound", ["2", "q_idx // 4", "-1"])
def test_quotients_are_solved_for_positive_divisors_alone(op: str, divisor: str, bound: str) -> None:
    scope: dict[str, Any] = {"maximum": maximum, "below": -3, "above": 3}
    exec(f"def mask(b, h, q_idx, kv_idx):\n    return kv_idx // {divisor} {op} {bound}", scope)
    traced = trace_mask(scope["mask"])
    plain = {"maximum": max, "below": -3, "above": 3}
    for q in range(0, 16, 3):
        for kv in range(16):
            leaves = {"q_idx": q, "kv_idx": kv}
            value = evaluate(traced.graph, leaves, scalars=traced.scalars)
            assert value == eval(f"kv_idx // {divisor} {op} {bound}", {**plain, **leaves}), traced.graph.describe()
