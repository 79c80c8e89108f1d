"""What is shared between classes of calls: traced problems and resolved configs."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from helpers_attention import FakeBackend, qkv
from helpers_tune import record
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.errors import UnsupportedError
from flashsmith.generator.families import FAMILIES, families_for
from flashsmith.generator.spec import AttentionSpec, ProblemShape
from flashsmith.runtime import preparation
from flashsmith.runtime.attention import attention, last_plan, only_family, use_backend
from flashsmith.runtime.emulated import emulated_attention
from flashsmith.runtime.preparation import remember
from flashsmith.runtime.store import save_records
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


# ---- Which family ------------------------------------------------------------------------------------------------


def test_strides_that_the_best_family_cannot_read_fall_back_and_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(preparation, "_said", set())
    q, k, v = qkv(hk=1)
    with use_backend(FakeBackend("sm_90")), caplog.at_level(logging.WARNING, logger="flashsmith"):
        attention(q, k, v)
        assert last_plan().family == "forward_sm90" and not caplog.records
        shared = k.expand(2, 47, 4, 64)
        for _ in range(2):
            attention(q, shared, v.expand(2, 47, 4, 64))
            assert last_plan().family == "forward_sm80"
        attention(q[:, :20], shared, v.expand(2, 47, 4, 64))  # another class of calls, the same reason
    (said,) = [record.getMessage() for record in caplog.records]
    assert "forward_sm90 cannot read these tensors in place" in said and "k has (3008, 64, 0)" in said
    assert "forward_sm80 is used: make them contiguous" in said


def test_each_family_keeps_its_own_resolution():
    """Equal shapes with other strides take another family, and must not take the first one's config."""
    q, k, v = qkv(hk=4)
    backend = FakeBackend("sm_90")
    with use_backend(backend):
        attention(q, k, v)
        attention(q, k[:, :, :1].expand(k.shape), v)
        attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    families = [launch.config.family for launch in backend.launches]
    assert families == ["forward_sm90", "forward_sm80", "forward_sm90"]


def test_a_family_can_be_chosen_for_a_while():
    q, k, v = qkv()
    with use_backend(FakeBackend("sm_90")):
        attention(q, k, v)
        with only_family("forward_sm80"):
            attention(q, k, v)
            assert last_plan().family == "forward_sm80"
        attention(q, k, v)
        assert last_plan().family == "forward_sm90"
        with pytest.raises(UnsupportedError, match="Did you mean 'forward_sm80'"), only_family("forward_sm8"):
            pass
        with only_family("forward_sm90"), pytest.raises(UnsupportedError, match="with these strides"):
            attention(q, k[:, :1].expand(k.shape), v)
    refused = pytest.raises(UnsupportedError, match="forward_sm90 cannot do")
    with use_backend(FakeBackend("sm_80")), only_family("forward_sm90"), refused:
        attention(q, k, v)


def test_the_emulator_makes_the_same_choice():
    q, k, v = qkv(b=1, sq=9, sk=12, h=2, hk=2, d=16)
    shared = k[:, :, :1].expand(k.shape), v[:, :, :1].expand(v.shape)
    out = emulated_attention(q, *shared, arch="sm_90")
    assert torch.equal(out, emulated_attention(q, *shared, arch="sm_80", config=FAMILIES["forward_sm80"].default_config(
        AttentionSpec(dtype="fp16", head_dim=16), arch_from_name("sm_90"))))  # fmt: skip


def test_a_cache_keeps_the_newest():
    cache = {}
    for i in range(5):
        remember(cache, i, str(i), 3)
    remember(cache, 3, "three", 3)
    assert cache == {2: "2", 3: "three", 4: "4"}


def test_a_call_passes_over_a_config_that_packs_another_ratio_of_heads(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", str(tmp_path))
    family, arch = FAMILIES["forward_sm90"], arch_from_name("sm_90")
    spec = AttentionSpec(dtype="fp16", head_dim=64)
    space = family.space(spec, arch)
    packed = next(config for config in space if config.to_dict()["pack_gqa"])
    plain = next(config for config in space if config != family.default_config(spec, arch))
    records = [
        record(packed, spec, ProblemShape(1, 16, 300, 8, 2)),
        record(plain, spec, ProblemShape(1, 16, 900, 8, 8)),
    ]
    save_records(records, arch=arch.name, family=family.name, gpu=FakeBackend("sm_90").device_name(0) or "")
    for heads, used in ((2, packed), (1, packed), (8, plain)):
        backend = FakeBackend("sm_90")
        with use_backend(backend):
            attention(*qkv(b=1, sq=16, sk=300, h=8, hk=heads, d=64))
        assert backend.launches[-1].config == used


def test_a_call_passes_over_a_config_that_breaks_the_gate(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", str(tmp_path))
    backend = FakeBackend()
    arch, name = backend.arch(0), backend.device_name(0)
    spec = AttentionSpec(dtype="fp16", head_dim=16)
    family = families_for(spec, arch)[0]
    nearest, farther = [config for config in family.space(spec, arch) if config != family.default_config(spec, arch)][
        :2
    ]
    records = [record(nearest, spec, ProblemShape(1, 300, 300, 4, 4)), record(farther, spec)]
    save_records(records, arch=arch.name, family=family.name, gpu=name or "")
    refused = []
    for bad, used in (
        ((), nearest),
        ((nearest,), farther),
        ((nearest, farther), backend.default_config(spec, family, 0)),
    ):
        preparation.forget()
        backend = FakeBackend()
        backend.refusal = lambda spec, config, family, device, bad=bad: "spills" if config in bad else ""
        q, k, v = qkv(b=1, sq=300, sk=300, d=16, dtype=torch.float16)
        with use_backend(backend):
            attention(q, k, v)
            refused.append(last_plan().note.count("passed over for the build gate"))
        assert backend.launches[-1].config == used
    assert refused == [0, 1, 2]
