"""Functions with effects, and those that ask what a traced value is: refused before anything happens."""

# mypy: disable-error-code="func-returns-value"

from __future__ import annotations

import collections
import enum
import functools
import logging
import math
import os
import random
import sys
import time
import types
from os import makedirs
from pathlib import Path
from random import random as draw
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from flashsmith.generator.errors import TraceError
from flashsmith.generator.language import trace_mask, trace_score, where

seen: set[int] = set()
table: dict[str, Any] = {"w": 3}
queue: collections.deque[int] = collections.deque()
log = logging.getLogger("effects")
add_seen = seen.add
module = types.ModuleType("a_users_module")
module.table, module.n, module.list_of = {}, 3, [1]  # type: ignore[attr-defined]
iterator = iter((1, 2, 3))
folder = Path("a folder that must not appear")


class Settings:
    window = 4
    items: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.z = 2

    @staticmethod
    def next(q: Any) -> Any:
        return q + 1


class Mode(enum.Enum):
    A = 1
    B = 2


mode = Mode.A


def sets_environment(b: Any, h: Any, q: Any, kv: Any) -> Any:
    os.environ["FLASHSMITH_TEST_EFFECT"] = "1"
    return q >= kv


def sets_class(b: Any, h: Any, q: Any, kv: Any) -> Any:
    Settings.window = 5
    return q >= kv


def sets_item(b: Any, h: Any, q: Any, kv: Any) -> Any:
    table["x"] = 1
    return q >= kv


def sets_item_of_module(b: Any, h: Any, q: Any, kv: Any) -> Any:
    module.table["x"] = 1
    return q >= kv


def sets_torch(b: Any, h: Any, q: Any, kv: Any) -> Any:
    torch.effect = 1  # type: ignore[attr-defined]
    return q >= kv


def sets_in_helper(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return sets_item(b, h, q, kv)


def writes(b: Any, h: Any, q: Any, kv: Any) -> Any:
    sys.stdout.write("written")
    return q >= kv


def adds_and_catches(b: Any, h: Any, q: Any, kv: Any) -> Any:
    try:  # noqa: SIM105 - what people write
        seen.add(1)
    except Exception:  # noqa: BLE001
        pass
    return q >= kv


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (lambda b, h, q, kv: seen.add(1) or q >= kv, "set.add()"),
        (lambda b, h, q, kv: add_seen(1) or q >= kv, "set.add()"),
        (adds_and_catches, "set.add()"),
        (lambda b, h, q, kv: table.update(x=1) or q >= kv, "dict.update()"),
        (lambda b, h, q, kv: table.setdefault("x", 1) + q >= kv, "dict.setdefault()"),
        (lambda b, h, q, kv: table.__setitem__("x", 1) or q >= kv, "assigns to table[...]"),
        (lambda b, h, q, kv: queue.append(1) or q >= kv, "deque.append()"),
        (lambda b, h, q, kv: module.list_of.append(1) or q >= kv, "append"),
        (lambda b, h, q, kv: Settings.items.append(1) or q >= kv, "append"),
        (sets_item, "assigns to table[...]"),
        (sets_item_of_module, "assigns to table[...]"),
        (sets_in_helper, "assigns to table[...]"),
        (sets_class, "assigns to Settings.window"),
        (sets_torch, "assigns to torch.effect"),
        (sets_environment, "os.__setitem__()"),
        (lambda b, h, q, kv: os.putenv("FLASHSMITH_TEST_EFFECT", "1") or q >= kv, "putenv()"),
        (lambda b, h, q, kv: os.makedirs(str(folder)) or q >= kv, "os.makedirs()"),
        (lambda b, h, q, kv: makedirs(str(folder)) or q >= kv, "os.makedirs()"),
        (lambda b, h, q, kv: os.mkdir(str(folder)) or q >= kv, "mkdir()"),
        (lambda b, h, q, kv: folder.mkdir() or q >= kv, "pathlib.Path.mkdir()"),
        (lambda b, h, q, kv: open(folder, "w") and q >= kv, "open()"),  # noqa: SIM115
        (writes, "write()"),
        (lambda b, h, q, kv: logging.warning("said") or q >= kv, "logging.warning()"),
        (lambda b, h, q, kv: log.warning("said") or q >= kv, "logging.Logger.warning()"),
        (lambda b, h, q, kv: q * random.random() >= kv, "Random.random()"),
        (lambda b, h, q, kv: q * draw() >= kv, "Random.random()"),
        (lambda b, h, q, kv: q * random.randint(1, 1) >= kv, "random.randint()"),
        (lambda b, h, q, kv: q * time.time() >= kv, "time.time()"),
        (lambda b, h, q, kv: q * torch.rand(1).item() >= kv, "torch.rand()"),
        (lambda b, h, q, kv: torch.manual_seed(0) and q >= kv, "torch.random.manual_seed()"),
        (lambda b, h, q, kv: sum(iterator) + q >= kv, "draws from the iterator iterator"),
        (lambda b, h, q, kv: sys.exit(3) or q >= kv, "sys.exit()"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_function_must_not_call(mask: Any, words: str, capfd: Any, caplog: Any) -> None:
    random_state, torch_state = random.getstate(), torch.random.get_rng_state()
    with pytest.raises(TraceError) as caught:
        trace_mask(mask)
    assert words in str(caught.value) and "[test_language_effects.py, line " in str(caught.value)
    assert not seen and table == {"w": 3} and not queue and not folder.exists() and Settings.window == 4
    assert module.table == {} and not Settings.items and not hasattr(torch, "effect")
    assert "FLASHSMITH_TEST_EFFECT" not in os.environ
    assert random.getstate() == random_state and torch.equal(torch.random.get_rng_state(), torch_state)
    assert capfd.readouterr().out == "" and caplog.text == ""


def test_an_iterator_is_not_drawn_from() -> None:
    left = iter((1, 2, 3))
    with pytest.raises(TraceError, match="draws from the iterator left"):
        trace_mask(lambda b, h, q, kv: sum(left) + q >= kv)
    assert list(left) == [1, 2, 3]


def raises_exit(b: Any, h: Any, q: Any, kv: Any) -> Any:
    raise SystemExit(3)


def test_a_request_to_end_the_process_is_an_error() -> None:
    with pytest.raises(TraceError, match="raised SystemExit while it was traced"):
        trace_mask(raises_exit)


def branches(b: Any, h: Any, q: Any, kv: Any) -> Any:
    try:
        return q > 3 if q >= kv else q < kv
    except Exception:  # noqa: BLE001
        return q < kv


def looks_up(b: Any, h: Any, q: Any, kv: Any) -> Any:
    try:
        return q in {1, 2}
    except TypeError:
        return q < kv


def rounds(b: Any, h: Any, q: Any, kv: Any) -> Any:
    try:
        return round(q) > kv
    except TypeError:
        return q < kv


def branches_then_fails(b: Any, h: Any, q: Any, kv: Any) -> Any:
    try:
        bool(q)
    except TraceError:
        raise ValueError from None


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (branches, ["depends on a traced value", "branches caught this error", "take the `try` away"]),
        (branches_then_fails, ["depends on a traced value"]),
        (looks_up, ["cannot be hashed"]),
        (rounds, ["round()"]),
        (lambda b, h, q, kv: (q >= kv) if type(kv) is int else (q < kv), ["type() of a traced value"]),
        (lambda b, h, q, kv: (q >= kv) if isinstance(kv, int) else (q < kv), ["isinstance() of a traced value"]),
        (lambda b, h, q, kv: (q >= kv) if isinstance(kv, (str, float)) else (q < kv), ["isinstance()"]),
        (lambda b, h, q, kv: (q >= kv) if str(kv) == "3" else (q < kv), ["has no text", "x == 3"]),
        (lambda b, h, q, kv: (q >= kv) if repr(kv) == "3" else (q < kv), ["has no text"]),
        (lambda b, h, q, kv: (q >= kv) if f"{kv}" == "3" else (q < kv), ["has no text"]),
        (lambda b, h, q, kv: {q: 1} and q >= kv, ["cannot be hashed"]),
        (lambda b, h, q, kv: 2**q > kv, ["literal exponent"]),
        (lambda b, h, q, kv: q**kv > 1, ["literal exponent", "a traced one"]),
        (lambda b, h, q, kv: divmod(q, 2)[0] > kv, ["divmod()"]),
        (lambda b, h, q, kv: math.floor(q) > kv, ["math.floor()"]),
    ],
)
def test_a_function_must_not_ask_what_a_traced_value_is(mask: Any, words: list[str]) -> None:
    with pytest.raises(TraceError) as caught:
        trace_mask(mask)
    for word in words:
        assert word in str(caught.value)


def collects(b: Any, h: Any, q: Any, kv: Any) -> Any:
    import math

    from flashsmith.generator.language import maximum

    terms = []
    for i in range(3):
        terms.append(q + i == kv)
    named = {"x": terms[0]}
    named.update(y=terms[1])
    return terms[2] | named["x"] | named["y"] | (maximum(q, 1) * math.sqrt(4.0) > kv)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (collects, "(q_idx + 2 == kv_idx) | (q_idx == kv_idx) | (q_idx + 1 == kv_idx) |"
                   " (float(kv_idx) < float(maximum(q_idx, 1)) * 2.0)"),
        (lambda b, h, q, kv: functools.reduce(lambda x, y: x | y, [q == 0, q == 1]),
         "(q_idx == 0) | (q_idx == 1)"),
        (lambda b, h, q, kv: q >= kv + table.get("w") + table.get("none", 1), "kv_idx < q_idx - w"),
        (lambda b, h, q, kv: q >= kv + sum(v for _, v in table.items()), "kv_idx <= q_idx - w"),
        (lambda b, h, q, kv: q >= kv + Settings.window, "kv_idx <= q_idx - window"),
        (lambda b, h, q, kv: Settings.next(q) > kv + Settings().z, "kv_idx < q_idx - 1"),
        (lambda b, h, q, kv: q >= kv if mode is Mode.A and Mode(1) is Mode["A"] and len(Mode) == 2 else q < kv,
         "kv_idx <= q_idx"),
        (lambda b, h, q, kv: q >= kv if isinstance(Settings(), Settings) and isinstance(3, (int, Settings)) else q < kv,
         "kv_idx <= q_idx"),
        (lambda b, h, q, kv: q >= kv if type(Settings()) is Settings and type(mode) is Mode else q < kv,
         "kv_idx <= q_idx"),
        (lambda b, h, q, kv: q >= kv + module.n, "kv_idx <= q_idx - n"),
        (lambda b, h, q, kv: q >= kv if "a, b".replace(", ", "") == "ab" and f"{3}" == "3" else q < kv,
         "kv_idx <= q_idx"),
        (lambda b, h, q, kv: min(q, kv) > max(1, 2) + round(2.5) + len([1]) + math.floor(2.5),
         "7 < minimum(q_idx, kv_idx)"),
        (lambda b, h, q, kv: q > np.arange(3).sum(), "3 < q_idx"),
        (lambda b, h, q, kv: torch.where(q > 1, q, kv) > torch.tensor(2).item(), "2 < where(1 < q_idx, q_idx, kv_idx)"),
    ],
)  # fmt: skip
def test_what_a_function_may_call(mask: Any, text: str) -> None:
    assert trace_mask(mask).graph.describe() == text


def test_a_profiler_of_the_caller_is_put_back() -> None:
    calls: list[str] = []

    def profiler(frame: Any, event: str, arg: Any) -> None:
        calls.append(event)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        trace_mask(lambda b, h, q, kv: q >= kv)
        with pytest.raises(TraceError):
            trace_mask(lambda b, h, q, kv: time.time() > 0)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)


def negates(b: Any, h: Any, q: Any, kv: Any) -> Any:
    found = q >= kv
    for i in range(900):
        found = ~(found | (kv * 3 == q + 2 * i))
    return found


def test_a_loop_of_negations_is_traced_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashsmith.generator.language import rules

    made: list[str] = []
    original = rules.make  # type: ignore[attr-defined]

    def counted(*args: Any) -> Any:
        made.append(args[0])
        return original(*args)

    monkeypatch.setattr(rules, "make", counted)
    graph = trace_mask(negates).graph
    assert 3000 < len(graph.nodes) < 4096
    assert len(made) < 20 * len(graph.nodes)


def never_ends(b: Any, h: Any, q: Any, kv: Any) -> Any:
    found = q >= kv
    while True:
        found = ~found


def test_a_loop_that_never_ends_is_refused_while_it_runs() -> None:
    with pytest.raises(TraceError, match=r"at most 4096 operations, but this one has made \d+ by this line"):
        trace_mask(never_ends)


def test_negating_twice_gives_the_same_expression_back() -> None:
    traced = trace_score(lambda s, b, h, q, kv: where(~~((q >= kv) | ~(kv > 3) & (s < 1.0)), s, 0.0))
    plain = trace_score(lambda s, b, h, q, kv: where((q >= kv) | ~(kv > 3) & (s < 1.0), s, 0.0))
    assert traced.graph == plain.graph
