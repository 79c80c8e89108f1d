"""What is shared between classes of calls: traced problems and resolved configs."""

from __future__ import annotations

import math

import pytest
from helpers_attention import FakeBackend, qkv
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.runtime import preparation
from flashsmith.runtime.attention import attention, use_backend
from flashsmith.runtime.preparation import remember
from flashsmith.runtime.store_choice import STEPS_PER_OCTAVE, rounded


@given(st.integers(0, 1 << 29))
def test_rounded_lengths_are_near_and_fixed_points(length):
    near = rounded(length)
    assert rounded(near) == near
    assert abs(near - length) <= length / 16


@pytest.mark.parametrize("length", [0, 1, 2, 15, *(1 << i for i in range(4, 29)), 3 << 10, 5 << 10])
def test_common_lengths_stay_what_they_are(length):
    assert rounded(length) == length


@given(st.integers(0, 1 << 20))
def test_rounding_keeps_the_order(length):
    assert rounded(length) <= rounded(length + 1)


def test_growing_lengths_share_look_ups_and_traces(monkeypatch):
    resolved, traced = [], []
    choose, problem_of = preparation.choose_config, preparation.problem_of
    monkeypatch.setattr(
        preparation, "choose_config", lambda *args, **ways: resolved.append(args) or choose(*args, **ways)
    )
    monkeypatch.setattr(preparation, "problem_of", lambda **flags: traced.append(flags) or problem_of(**flags))
    q, k, v = qkv(b=1, sq=1, sk=600, d=16)
    with use_backend(FakeBackend()):
        for length in range(300, 600, 3):
            attention(q, k[:, :length], v[:, :length], causal=True)
    assert len(traced) == 1
    assert len(resolved) <= math.ceil(STEPS_PER_OCTAVE * math.log2(600 / 300)) + 1


def test_a_cache_keeps_the_newest():
    cache = {}
    for i in range(5):
        remember(cache, i, str(i), 3)
    remember(cache, 3, "three", 3)
    assert cache == {2: "2", 3: "three", 4: "4"}
