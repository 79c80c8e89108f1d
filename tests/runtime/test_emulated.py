"""attention on CPU tensors, by name: the function that the error without a GPU points to."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_right, qkv

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.errors import ArchError, EmulatorError, SpecError, TensorError
from flashsmith.generator.families import family_named
from flashsmith.runtime import emulated
from flashsmith.runtime.emulated import emulated_attention, emulated_run
from flashsmith.runtime.emulator.report import Finding, Report


def test_it_is_attention():
    q, k, v = qkv(b=1, d=32, dtype=torch.bfloat16)
    slopes = torch.rand(4)
    call = {"causal": True, "alibi_slopes": slopes, "softmax_scale": 0.3}
    out, lse = emulated_attention(q, k, v, return_lse=True, **call)
    assert_right(out, lse, q, k, v, **call)
    assert torch.equal(emulated_attention(q, k, v, **call), out)


def test_the_config_and_the_way_of_running_can_be_chosen():
    q, k, v = qkv(b=1, sq=20, sk=20, d=32)
    family, arch = family_named("forward_sm80"), arch_from_name("sm_86")
    default, *_, other = family.space(emulated.problem_of_call({}, emulated.check_inputs(q, k, v)).spec, arch)
    results = []
    for config in (default, other):
        out, lse, report = emulated_run(q, k, v, arch="sm_86", config=config, flavour="race", schedule="random", seed=3)
        assert report.clean and report.flavour == "race" and report.schedule == "random"
        assert_right(out, lse, q, k, v)
        results.append(out)


def test_what_the_kernel_does_wrong_is_an_error(monkeypatch):
    report = Report(findings=(Finding("race", "two threads wrote one word"),))
    monkeypatch.setattr(emulated, "emulate_forward", lambda *_, **__: (torch.zeros(1), torch.zeros(1), report))
    with pytest.raises(EmulatorError, match="two threads wrote one word"):
        emulated_attention(*qkv(b=1, d=32))


def test_bad_calls_are_refused_as_on_a_gpu():
    q, k, v = qkv(b=1, d=32)
    with pytest.raises(TensorError, match="same length"):
        emulated_attention(q, k, v[:, :3])
    with pytest.raises(TensorError, match="alibi_slopes"):
        emulated_attention(q, k, v, alibi_slopes=torch.rand(3))
    with pytest.raises(SpecError, match="window_size"):
        emulated_attention(q, k, v, window_size=3)
    with pytest.raises(SpecError, match="softmax_scale"):
        emulated_attention(q, k, v, softmax_scale=-1.0)
    with pytest.raises(ArchError):
        emulated_attention(q, k, v, arch="sm_75")
