"""Tracing: what is captured and how it is named, and a clear error for every function that cannot be traced."""

from __future__ import annotations

import enum
import functools
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
    or_masks,
    trace_mask,
    trace_score,
    where,
)

window, flag, label = 7, True, "left"
table = torch.arange(12, dtype=torch.int32).reshape(3, 4)
bias = torch.zeros(5)
config = SimpleNamespace(window=3, table=table, inner={"limit": 9})
numbers = [1, 2]


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


def test_one_tensor_under_two_names_is_one_argument() -> None:
    same = table
    traced = trace_mask(lambda b, h, q, kv: table[b, kv] == same[b, q])
    assert len(traced.graph.tables) == 1 and traced.tables[0] is table


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
        (
            lambda s, b, h, q, kv: torch.exp2(-(h + 1) * 8.0 / 16) * s,
            "exp(float(-(h + 1)) * 8.0 * 0.0625 * 0.6931472) * score",
        ),
        (lambda s, b, h, q, kv: torch.log2(torch.square(s)), "log(score * score) * 1.442695"),
        (lambda s, b, h, q, kv: torch.sigmoid(torch.rsqrt(s)), "1.0 / (1.0 + exp(-(1.0 / sqrt(score))))"),
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
