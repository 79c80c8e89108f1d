"""Tracing: what is captured and how it is named, and a clear error for every function that cannot be traced."""

from __future__ import annotations

import enum
import functools
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flashsmith.generator import mods
from flashsmith.generator.errors import TraceError
from flashsmith.generator.language import (
    Graph,
    Traced,
    and_masks,
    compose_scores,
    exp,
    maximum,
    or_masks,
    tanh,
    trace_mask,
    trace_score,
    where,
)

window, ratio, flag, label = 7, 0.25, True, "left"
table = torch.arange(12, dtype=torch.int32).reshape(3, 4)
bias = torch.zeros(5)
config = SimpleNamespace(window=3, table=table, inner={"limit": 9})
numbers = [1, 2]
calls = 0
huge = 1 << 70


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


side = Side.LEFT


class Window:
    """A mask with state, as users write them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.inside(q_idx, kv_idx)

    def inside(self, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= self.size


def shown(fn: Any) -> tuple[str, tuple[Any, ...]]:
    traced = trace_mask(fn)
    return traced.graph.describe(), traced.scalars


# ---- Captures --------------------------------------------------------------------------------


def test_globals_closures_and_defaults_become_arguments() -> None:
    limit = 11

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, most: int = 13) -> Any:
        return (q_idx - kv_idx <= window) & (kv_idx < limit) & (q_idx < most)

    text, values = shown(mask)
    assert text == "(q_idx - window <= kv_idx) & (kv_idx < limit) & (q_idx < most)"
    assert values == (7, 11, 13)


def test_another_value_is_the_same_graph() -> None:
    one, other = trace_mask(mods.sliding_window(3, 4)), trace_mask(mods.sliding_window(30, 40))
    assert one.graph == other.graph and one.graph.digest == other.graph.digest
    assert (one.scalars, other.scalars) == ((3, 4), (30, 40))


def test_literals_flags_and_strings_are_constants() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = kv_idx <= q_idx + 2
        return seen & (q_idx < 5) if flag and label == "left" and side is Side.LEFT else seen

    assert shown(mask) == ("(kv_idx <= q_idx + 2) & (q_idx < 5)", ())


def test_helpers_and_partials_are_made_over_too() -> None:
    def distance(q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, size: int) -> Any:
        return distance(q_idx, kv_idx) <= size

    assert shown(functools.partial(near, size=6)) == ("q_idx - size <= kv_idx", (6,))


def test_a_variable_read_twice_is_one_argument_and_equal_names_are_told_apart() -> None:
    def part(size: int) -> Any:
        return lambda q_idx, kv_idx: (q_idx - kv_idx <= size) & (kv_idx - q_idx <= size)

    first, second = part(3), part(4)
    text, values = shown(lambda b, h, q_idx, kv_idx: first(q_idx, kv_idx) | second(q_idx, kv_idx))
    assert values == (3, 4)
    assert text.count("size_2") == 2 and text.count("size") == 4


def test_objects_dicts_and_lists() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = q_idx - kv_idx <= config.window + config.inner["limit"]
        for number in numbers:
            seen = seen | (kv_idx == number)
        return seen & (config.table[b, h] > 0)

    text, values = shown(mask)
    assert values == (3, 9, 1, 2)
    assert "window + limit" in text and "numbers_1" in text and "table[b, h]" in text


def test_callable_objects_and_methods() -> None:
    instance = Window(5)
    assert shown(instance) == ("q_idx - size <= kv_idx", (5,))
    assert shown(lambda b, h, q_idx, kv_idx: instance.inside(q_idx, kv_idx)) == ("q_idx - size <= kv_idx", (5,))
    method = instance.inside
    assert shown(lambda b, h, q_idx, kv_idx: method(q_idx, kv_idx)) == ("q_idx - size <= kv_idx", (5,))


def test_tensors_of_torch_and_numpy() -> None:
    ids = np.zeros(4, dtype=np.int64)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[q_idx] == ids[kv_idx]) & (table[b, kv_idx] > 0)

    traced = trace_mask(mask)
    assert [(slot.name, slot.dtype, slot.ndim) for slot in traced.graph.tables] == [
        ("ids", "int64", 1),
        ("table", "int32", 2),
    ]
    assert traced.tables[0] is ids and traced.tables[1] is table


def test_zero_dimensional_tensors_and_numpy_scalars() -> None:
    scale, count, on = torch.tensor(2.0), np.int32(3), np.bool_(True)
    traced = trace_score(lambda s, b, h, q, kv: where(on & (kv < count), s * scale, np.float32(0.5) * s))
    assert traced.graph.describe() == "where(kv_idx < count, score * scale[()], score * 0.5)"
    assert traced.scalars == (3,) and type(traced.scalars[0]) is int and traced.tables == (scale,)


def test_numbers_beyond_32_bits_are_64_bit_arguments() -> None:
    far, near = 1 << 40, 1 << 30
    traced = trace_mask(lambda b, h, q, kv: (kv < far) & (kv < near))
    assert [slot.dtype for slot in traced.graph.scalars] == ["int64", "int32"]


def test_floats_are_rounded_to_fp32() -> None:
    tenth = 0.1
    assert trace_score(lambda s, b, h, q, kv: s * tenth).scalars == (float(np.float32(0.1)),)


def test_names_are_identifiers_of_cpp() -> None:
    scope: dict[str, Any] = {}
    exec("größe, _, a_stride_0, int_very_long_name_of_a_window_size = 1, 2, 3, 4\n"
         "def mask(b, h, q, kv):\n"
         "    return (kv < größe) & (kv < _) & (kv < a_stride_0) & (kv < int_very_long_name_of_a_window_size)",
         scope)  # fmt: skip
    names = [slot.name for slot in trace_mask(scope["mask"]).graph.scalars]
    assert names == ["grxxe", "value", "a_stride_0_v", "int_very_long_na"]


def test_equal_names_of_any_form_stay_identifiers() -> None:
    def read(name: str) -> Any:
        scope: dict[str, Any] = {}
        exec(f"def make({name}):\n    return lambda kv: kv < {name}", scope)
        return scope["make"]

    for name in ("a_stride", "a_size_1", "a_name_of_one_hundred_letters", "__"):
        bounds = [read(name)(value) for value in range(3)]

        def mask(b: Any, h: Any, q: Any, kv: Any, bounds: Any = bounds) -> Any:
            return bounds[0](kv) | bounds[1](kv) | bounds[2](kv)

        traced = trace_mask(mask)
        assert traced.scalars == (0, 1, 2)
        assert Graph.from_dict(traced.graph.to_dict()) == traced.graph


def test_a_function_may_name_itself() -> None:
    def power(x: Any, times: int) -> Any:
        return x if times == 1 else x * power(x, times - 1)

    assert trace_score(lambda s, b, h, q, kv: power(s, 3)).graph.describe() == "score * (score * score)"


def test_a_traced_mask_can_be_called_inside_another() -> None:
    inner = trace_mask(mods.sliding_window(4, -1))
    text, values = shown(lambda b, h, q_idx, kv_idx: inner(b, h, q_idx, kv_idx) & (kv_idx <= q_idx))
    assert text == "(q_idx + (seqlen_k - seqlen_q) - left <= kv_idx) & (kv_idx <= q_idx)" and values == (4,)


def test_a_traced_mask_cannot_be_called_alone() -> None:
    with pytest.raises(TraceError, match="inside another mask or score function"):
        trace_mask(mods.causal)(0, 0, 1, 2)


def test_the_functions_own_module_is_untouched() -> None:
    before = dict(globals())
    trace_mask(lambda b, h, q, kv: q - kv <= window)
    assert globals()["window"] == 7 and dict(globals()) == before


# ---- Python and torch functions --------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")), "where(kv_idx <= q_idx, score, -inf)"),
        (lambda s, b, h, q, kv: torch.tanh(s / 2) * 2, "tanh(score * 0.5) * 2.0"),
        (lambda s, b, h, q, kv: s.tanh().abs(), "abs(tanh(score))"),
        (lambda s, b, h, q, kv: s - torch.abs(q - kv), "score - float(abs(q_idx - kv_idx))"),
        (lambda s, b, h, q, kv: torch.clamp(s, min=-1.0, max=1.0), "minimum(maximum(score, -1.0), 1.0)"),
        (lambda s, b, h, q, kv: torch.clamp(input=s, max=1.0), "minimum(score, 1.0)"),
        (lambda s, b, h, q, kv: torch.maximum(s, s + bias[h]), "maximum(score, score + bias[h])"),
        (lambda s, b, h, q, kv: torch.add(s, other=torch.exp(s)), "score + exp(score)"),
        (lambda s, b, h, q, kv: torch.sqrt(torch.log(s)), "sqrt(log(score))"),
        (lambda s, b, h, q, kv: min(max(s, 0.0), 1.0), "minimum(maximum(score, 0.0), 1.0)"),
        (lambda s, b, h, q, kv: s + float(q), "score + float(q_idx)"),
        (lambda s, b, h, q, kv: s**3, "score * score * score"),
        (lambda s, b, h, q, kv: s + (q >= kv) * 2, "score + float(where(kv_idx <= q_idx, 1, 0) * 2)"),
        (lambda s, b, h, q, kv: 1 - s, "1.0 - score"),
        (lambda s, b, h, q, kv: +s, "score"),
        (lambda s, b, h, q, kv: q, "float(q_idx)"),
        (lambda s, b, h, q, kv: 2, "2.0"),
        (
            lambda s, b, h, q, kv: 7 // (q + 1) / 2 + 7 % (q + 1),
            "float(7 // (q_idx + 1)) * 0.5 + float(7 % (q_idx + 1))",
        ),
        (lambda s, b, h, q, kv: s + ((1 << (q & 3)) | (8 >> (q & 3)) ^ (3 & q)), None),
    ],
)
def test_functions_and_conversions(score: Any, text: str | None) -> None:
    graph = trace_score(score).graph
    assert text is None or graph.describe() == text


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (
            lambda b, h, q, kv: torch.logical_and(q >= kv, torch.logical_not(kv < 2)),
            "(kv_idx <= q_idx) & (2 <= kv_idx)",
        ),
        (lambda b, h, q, kv: (q >= kv) == (h == 0), "~((kv_idx <= q_idx) ^ (h == 0))"),
        (lambda b, h, q, kv: (q >= kv) != (h == 0), "(kv_idx <= q_idx) ^ (h == 0)"),
        (lambda b, h, q, kv: True, "True"),
        (lambda b, h, q, kv: table.bool()[b, kv] if False else table[b, kv] != 0, "table[b, kv_idx] != 0"),
    ],
)
def test_bool_functions(mask: Any, text: str) -> None:
    assert trace_mask(mask).graph.describe() == text


# ---- Combination -----------------------------------------------------------------------------


def test_and_or_and_composition() -> None:
    near, far = mods.sliding_window(3, -1), mods.sliding_window(30, -1)
    both = and_masks(mods.causal, near, trace_mask(far))
    assert isinstance(both, Traced) and both.scalars == (3, 30)
    assert [slot.name for slot in both.graph.scalars] == ["left", "left_2"]
    graphs = or_masks(trace_mask(near).graph, trace_mask(mods.causal).graph)
    assert graphs.describe().count("|") == 1
    assert and_masks().graph.describe() == "True" and or_masks().graph.describe() == "False"
    score = compose_scores(lambda s, b, h, q, kv: s + 1.0, lambda s, b, h, q, kv: s * 2.0)
    assert score.graph.describe() == "(score + 1.0) * 2.0"
    assert compose_scores().graph.describe() == "score"


def test_one_tensor_in_two_mods_is_one_argument() -> None:
    ids = torch.zeros(6, dtype=torch.int32)
    both = and_masks(mods.document(ids), lambda b, h, q, kv: ids[q] >= 0)
    assert len(both.tables) == 1 and both.tables[0] is ids


def test_kinds_must_fit() -> None:
    score = trace_score(lambda s, b, h, q, kv: s)
    for wrong in (lambda: trace_mask(score), lambda: and_masks(score), lambda: and_masks(score.graph)):
        with pytest.raises(TraceError, match="mask is needed here"):
            wrong()


# ---- Errors ----------------------------------------------------------------------------------


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
        (lambda b, h, q, kv: q * random.random() >= kv, ["same expression each time", "random numbers"]),
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
    with pytest.raises(TraceError, match=r"\[test_language_trace.py, line \d+: if q >= kv:\]"):
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
