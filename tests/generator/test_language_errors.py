"""Functions that cannot be traced: each is refused with the rule, the values and what to write instead."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashsmith.generator.errors import TraceError
from flashsmith.generator.language import exp, maximum, tanh, trace_mask, trace_score, where

table = torch.arange(12, dtype=torch.int32).reshape(3, 4)
config = SimpleNamespace(window=3)
numbers = [1, 2]
calls = 0
huge = 1 << 70


def branching(b: Any, h: Any, q: Any, kv: Any) -> Any:
    if q >= kv:
        return kv > 2
    return False


def counting(b: Any, h: Any, q: Any, kv: Any) -> Any:
    global calls
    calls += 1
    return q >= kv


def deleting(b: Any, h: Any, q: Any, kv: Any) -> Any:
    global calls
    del calls
    return q >= kv


def nonlocal_counting() -> Any:
    count = 0

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        def inner() -> None:
            nonlocal count
            count += 1

        inner()
        return q >= kv

    return mask


def looping(b: Any, h: Any, q: Any, kv: Any) -> Any:
    total = 0
    for i in range(q):
        total = total + i
    return total > kv


def writing_table(b: Any, h: Any, q: Any, kv: Any) -> Any:
    table[0, 0] = 1
    return q >= kv


def writing_object(b: Any, h: Any, q: Any, kv: Any) -> Any:
    config.window = 4
    return q >= kv


def returning_nothing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    seen = q >= kv
    del seen


def asserting(b: Any, h: Any, q: Any, kv: Any) -> Any:
    assert q >= 0
    return q >= kv


def printing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    print(q)
    return q >= kv


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (branching, ["depends on a traced value", "where(condition, a, b)", "if q >= kv:"]),
        (lambda b, h, q, kv: q >= kv and kv > 3, ["`&`, `|`, `~`"]),
        (lambda b, h, q, kv: not q >= kv, ["instead of `and`, `or`, `not`"]),
        (lambda b, h, q, kv: 0 <= q < kv, ["instead of `a <= b < c`"]),
        (lambda b, h, q, kv: q in (1, 2), ["depends on a traced value"]),
        (asserting, ["depends on a traced value", "assert q >= 0"]),
        (counting, ["no side effects", "assigns to calls", "calls += 1"]),
        (deleting, ["no side effects", "assigns to calls"]),
        (nonlocal_counting(), ["no side effects", "assigns to count"]),
        (writing_table, ["must not write to the captured tensor table", "table[0, 0] = 1"]),
        (writing_object, ["no side effects", "config.window"]),
        (printing, ["no side effects", "print()", "print(q)"]),
        (lambda b, h, q, kv: numbers.append(1) or q >= kv, ["AttributeError", "append"]),
        (lambda b, h, q, kv: q * random.random() >= kv, ["no side effects", "Random.random()", "random.random()"]),
        (looping, ["known integer (range()", "for i in range(q):"]),
        (lambda b, h, q, kv: math.exp(q) > kv, ["known number (math.* or numpy)", "Use exp"]),
        (lambda b, h, q, kv: np.maximum(q, kv) > 3, ["known number (math.* or numpy)", "maximum"]),
        (lambda b, h, q, kv: np.asarray(q) > 3, ["known number (math.* or numpy)"]),
        (lambda b, h, q, kv: q.item() > kv, [".item()", "only known in the kernel"]),
        (lambda b, h, q, kv: int(q) > kv, ["int() of a traced value"]),
        (lambda b, h, q, kv: q.shape, ["no attribute 'shape'"]),
        (lambda b, h, q, kv: q[0] > 1, ["cannot be indexed"]),
        (lambda b, h, q, kv: len(q) > 1, ["cannot be iterated"]),
        (lambda b, h, q, kv: sum(q) > 1, ["cannot be iterated"]),
        (lambda b, h, q, kv: torch.softmax(q, 0) > 1, ["torch's softmax cannot be traced", "tanh"]),
        (lambda b, h, q, kv: torch.where(q > 1) > 1, ["torch's where was called with arguments"]),
        (lambda b, h, q, kv: torch.tensor(3) < q, ["torch.Tensor"]),
        (lambda b, h, q, kv: q > object(), ["builtins.object", "`>`"]),
        (lambda b, h, q, kv: q > config, ["types.SimpleNamespace", "Capture a number"]),
        (lambda b, h, q, kv: q > "3", ["builtins.str"]),
        (lambda b, h, q, kv: q + None > 3, ["NoneType"]),
        (lambda b, h, q, kv: q & (kv > 3), ["`&` takes two bools or two ints", "parentheses"]),
        (lambda b, h, q, kv: (q + 0.5) & 1 > 0, ["got fp32 and int"]),
        (lambda b, h, q, kv: ~(q + 0.5) > 0, ["`~` takes a bool or an int"]),
        (lambda b, h, q, kv: (q + 0.5) // 2 > kv, ["`//` takes ints", "Use `/`"]),
        (lambda b, h, q, kv: q // 0 > kv, ["by the constant 0"]),
        (lambda b, h, q, kv: q % (calls) > kv, ["divisor other than 0", "calls"]),
        (lambda b, h, q, kv: q << kv > 3, ["[0, 63]", "x << (n & 63)"]),
        (lambda b, h, q, kv: (q + 0.5) << 1 > 3, ["`<<` takes ints"]),
        (lambda b, h, q, kv: q**0.5 > 3, ["literal exponent"]),
        (lambda b, h, q, kv: where(q, kv, 3) > 1, ["must be a bool", "Compare it"]),
        (lambda b, h, q, kv: q > huge, ["must fit 64 bits", "huge"]),
        (lambda b, h, q, kv: q > (1 << 70), ["must fit 64 bits"]),
        (lambda b, h, q, kv: table[q] > 0, ["table has 2", "table[i, j]"]),
        (lambda b, h, q, kv: table[q, :] > 0, ["one int per dimension"]),
        (lambda b, h, q, kv: table[..., q] > 0, ["one int per dimension"]),
        (lambda b, h, q, kv: table[q, kv * 1.0] > 0, ["must be an int, but got fp32"]),
        (lambda b, h, q, kv: table[-1, kv] > 0, ["must be >= 0", "do not count from the end"]),
        (lambda b, h, q, kv: table > q, ["without an index", "table[i, j]"]),
        (lambda b, h, q, kv: table.sum() > q, [".sum was asked for", "Compute it outside"]),
        (lambda b, h, q, kv: bool(table) & (q > kv), ["depends on the captured tensor table"]),
        (lambda b, h, q, kv: torch.zeros(3)[q] > 0, ["__getitem__ cannot be traced"]),
        (lambda b, h, q, kv: torch.zeros(3).double()[0] * q > 0, ["torch.Tensor"]),
        (lambda b, h, q, kv: unknown_name > q, ["NameError", "unknown_name"]),  # type: ignore[name-defined]  # noqa: F821
        (lambda b, h, q, kv: q - kv, ["must return a bool", "returned int", "Compare it"]),
        (returning_nothing, ["returned None", "Add the `return`"]),
        (lambda b, h, q, kv: (q, kv), ["builtins.tuple"]),
        (lambda b, h, q: q > 1, ["takes the positional arguments (b, h, q_idx, kv_idx)"]),
        (lambda b, h, q, kv, extra: q > 1, ["takes the positional arguments (b, h, q_idx, kv_idx)"]),
        (3, ["must be a Python function, but got int"]),
        (None, ["must be a Python function"]),
        (max, ["must be a Python function"]),
        (torch.zeros(3, dtype=torch.float64), ["must be a Python function"]),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_masks_that_cannot_be_traced(mask: Any, words: list[str]) -> None:
    with pytest.raises(TraceError) as caught:
        trace_mask(mask)
    for word in words:
        assert word in str(caught.value)


def test_the_source_line_is_named() -> None:
    with pytest.raises(TraceError, match=r"\[test_language_errors.py, line \d+: if q >= kv:\]"):
        trace_mask(branching)


def test_no_side_effect_happens_while_an_error_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    for mask in (counting, printing, writing_table, writing_object):
        with pytest.raises(TraceError):
            trace_mask(mask)
    assert calls == 0 and int(table[0, 0]) == 0 and config.window == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(3, dtype=torch.float64), ["float64", "Convert it"]),
        (torch.zeros(3, dtype=torch.int16), ["int16"]),
        (torch.zeros(3, dtype=torch.complex64), ["complex64"]),
        (np.zeros((1,) * 9, dtype=np.int32), ["at most 8 dimensions"]),
    ],
)
def test_tensors_that_cannot_be_captured(tensor: Any, words: list[str]) -> None:
    with pytest.raises(TraceError) as caught:
        trace_mask(lambda b, h, q, kv: tensor[q] > 0)
    for word in words:
        assert word in str(caught.value)


def test_captured_nan_is_refused_and_infinity_is_not() -> None:
    nan, infinity = math.nan, math.inf
    with pytest.raises(TraceError, match="must not be NaN"):
        trace_score(lambda s, b, h, q, kv: s + nan)
    with pytest.raises(TraceError, match="NaN is not a value"):
        trace_score(lambda s, b, h, q, kv: s + float("nan"))
    assert trace_score(lambda s, b, h, q, kv: s + infinity).scalars == (math.inf,)


def test_scores_must_return_a_number() -> None:
    with pytest.raises(TraceError, match="returned a bool"):
        trace_score(lambda s, b, h, q, kv: q >= kv)
    with pytest.raises(TraceError, match="positional arguments \\(score, b, h, q_idx, kv_idx\\)"):
        trace_score(lambda b, h, q, kv: q)


def test_a_mask_may_not_be_endless() -> None:
    def long(b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen = q >= kv
        for i in range(2000):
            seen = seen | (kv * 3 == q + 2 * i)
        return seen

    with pytest.raises(TraceError, match="at most 4096 operations"):
        trace_mask(long)


def test_functions_of_the_language_take_plain_numbers() -> None:
    traced = trace_score(lambda s, b, h, q, kv: s + exp(0) + tanh(0.0) + maximum(1, 2))
    assert traced.graph.describe() == "score + 1.0 + 2.0"
