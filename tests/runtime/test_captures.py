"""Captured values as keys: whatever changes a trace changes the key, whatever does not leaves it."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import functools
import math

import numpy
import torch

from flashsmith.generator import mods
from flashsmith.generator.language import trace_mask
from flashsmith.runtime.captures import read_captures

LIMIT = 3
HELPER_LIMIT = 4


def helper(x):
    return x < HELPER_LIMIT


def key_of(*functions):
    captures = read_captures(*functions)
    assert captures is not None
    return captures.key


def window(w):
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < w


def test_equal_captures_have_equal_keys_across_function_objects():
    assert key_of(window(3)) == key_of(window(3))
    assert hash(key_of(window(3))) == hash(key_of(window(3)))


def test_numbers_are_told_apart_by_value_and_type():
    values = [3, 4, 3.0, True, 0.0, -0.0, numpy.int64(3), numpy.float32(3)]
    assert len({key_of(window(v)) for v in values}) == len(values)


def test_another_function_has_another_key():
    assert key_of(window(3)) != key_of(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= 3)
    assert key_of(window(3), None) != key_of(None, window(3))


def test_a_changed_closure_variable_is_seen():
    w = 3

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < w

    before = key_of(mask)
    w = 5
    assert key_of(mask) != before


def test_a_changed_global_is_seen_also_through_a_helper(monkeypatch):
    def direct(b, h, q_idx, kv_idx):
        return kv_idx < LIMIT

    def indirect(b, h, q_idx, kv_idx):
        return helper(kv_idx)

    def nested(b, h, q_idx, kv_idx):
        return (lambda x: x < LIMIT)(kv_idx)

    before = [key_of(f) for f in (direct, indirect, nested)]
    monkeypatch.setitem(globals(), "LIMIT", 30)
    monkeypatch.setitem(globals(), "HELPER_LIMIT", 40)
    assert all(key_of(f) != old for f, old in zip((direct, indirect, nested), before, strict=True))


def test_defaults_are_captures():
    def mask(b, h, q_idx, kv_idx, w=3, *, v=4):
        return q_idx - kv_idx < w + v

    before = key_of(mask)
    mask.__defaults__ = (5,)
    changed = key_of(mask)
    mask.__kwdefaults__ = {"v": 6}
    assert len({before, changed, key_of(mask)}) == 3


def test_a_tensor_counts_by_kind_not_by_content():
    table = torch.zeros(8)
    mask = window(table)
    before = key_of(mask)
    table += 1
    assert key_of(mask) == before
    assert key_of(window(torch.ones(8))) == before
    for other in (torch.zeros(9), torch.zeros(8).half(), torch.zeros(16)[::2], torch.zeros(8, device="meta")):
        assert key_of(window(other)) != before


def test_one_tensor_twice_is_not_two_tensors():
    def pair(a, c):
        return lambda b, h, q_idx, kv_idx: a[q_idx] == c[kv_idx]

    one, two = torch.zeros(8), torch.zeros(8)
    assert key_of(pair(one, one)) == key_of(pair(two, two))
    assert key_of(pair(one, one)) != key_of(pair(one, two))
    captures = read_captures(pair(one, two))
    assert captures is not None
    assert captures.tensors[0] is one and captures.tensors[1] is two


def test_gradients_of_captured_tensors_are_noticed():
    captures = read_captures(window(torch.zeros(8, requires_grad=True)))
    assert captures is not None and captures.wants_grad


def test_what_cannot_be_compared_has_no_key():
    class Settings:
        limit = 3

    settings = Settings()

    def unbound(b, h, q_idx, kv_idx):
        return kv_idx < later

    assert read_captures(window(settings)) is None
    assert read_captures(window({"limit": 3})) is None
    assert read_captures(window(numpy.bool_(True))) is None  # has a dtype and a shape, but is a number
    assert read_captures(unbound) is None
    later = 1
    assert read_captures(unbound) is not None


def test_modules_may_be_used_where_their_attributes_are_constant():
    import logging

    assert read_captures(window(math)) is not None
    assert read_captures(window(torch)) is not None
    assert read_captures(window(logging)) is None


def test_containers_partials_and_traced_functions_are_read_by_what_they_hold():
    assert key_of(window((1, 2))) == key_of(window((1, 2))) != key_of(window((1, 3)))
    assert key_of(window([1, 2])) != key_of(window([1, 2, 2]))

    def mask(b, h, q_idx, kv_idx, w):
        return q_idx - kv_idx < w

    assert key_of(functools.partial(mask, w=3)) == key_of(functools.partial(mask, w=3))
    assert key_of(functools.partial(mask, w=3)) != key_of(functools.partial(mask, w=4))
    assert key_of(trace_mask(window(3))) == key_of(trace_mask(window(3))) != key_of(trace_mask(window(4)))


def test_library_mods_are_told_apart():
    keys = [
        key_of(m)
        for m in (
            mods.causal,
            mods.sliding_window(3, -1),
            mods.sliding_window(4, -1),
            mods.sliding_window(-1, 3),
            mods.sliding_window(3, 3),
            mods.prefix_lm(3),
            mods.prefix_lm(4),
            mods.document(torch.zeros(8, dtype=torch.int32)),
            mods.document(torch.zeros(2, 8, dtype=torch.int32)),
        )
    ]
    assert len(set(keys)) == len(keys)


def test_a_function_that_names_itself_ends():
    def mask(b, h, q_idx, kv_idx):
        return mask if False else kv_idx < 3

    assert read_captures(mask) is not None
