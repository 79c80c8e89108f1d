"""attention on CPU tensors, by name: the function that the error without a GPU points to."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_right, qkv

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.errors import ArchError, EmulatorError, SpecError, TensorError, UnsupportedError
from flashsmith.generator.families import family_named
from flashsmith.runtime import emulated
from flashsmith.runtime.emulated import emulated_attention, emulated_run
from flashsmith.runtime.emulator.forward import emulate_forward
from flashsmith.runtime.emulator.report import Finding, Report
from flashsmith.runtime.problem import problem_of


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


def test_an_input_that_wants_a_gradient_is_refused_as_on_a_gpu():
    q, k, v = qkv(b=1, sq=8, sk=8, d=32)
    bias = torch.rand(8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        emulated_attention(q.requires_grad_(), k, v)
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        emulated_attention(q.detach(), k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx])
    with torch.no_grad():
        assert emulated_attention(q, k, v).shape == q.shape


def test_an_unknown_keyword_is_named_with_the_close_one():
    q, k, v = qkv(b=1, d=32)
    with pytest.raises(TypeError, match=r"emulated_attention\(\) got .* 'window'\. Did you mean 'window_size'\?"):
        emulated_attention(q, k, v, window=3)
    with pytest.raises(TypeError, match=r"emulated_attention\(\) got .* 'xyz'\. It takes causal, window_size"):
        emulated_attention(q, k, v, xyz=3)


def test_a_captured_tensor_is_checked_before_anything_runs(monkeypatch):
    monkeypatch.setattr(emulated, "emulate_forward", None)
    q, k, v = qkv(b=1, d=32)
    docs = torch.zeros(k.shape[1] - 1, dtype=torch.int32)

    def same(b, h, q_idx, kv_idx):
        return docs[kv_idx] == 0

    with pytest.raises(TensorError, match=rf"captured tensor docs .* {k.shape[1]} elements.* shape is .*larger tensor"):
        emulated_attention(q, k, v, mask_mod=same)
    docs = torch.zeros(k.shape[1], dtype=torch.int32, device="meta")
    with pytest.raises(TensorError, match=r"captured tensor 'docs' must be on the CPU.* on meta"):
        emulated_attention(q, k, v, mask_mod=same)
    docs = torch.eye(k.shape[1], dtype=torch.int32).to_sparse()
    with pytest.raises(TensorError, match="docs must be a dense tensor, but its layout is sparse_coo"):
        emulated_attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: docs[kv_idx, kv_idx] == 0)


def test_a_finding_names_the_captured_tensor():
    q, k, v = qkv(b=1, sq=8, sk=8, d=32)
    slopes, docs = torch.rand(4), torch.zeros(7, dtype=torch.int32)  # one too few
    problem = problem_of(
        dtype="fp16", head_dim=32, mask_mod=lambda b, h, q_idx, kv_idx: docs[q_idx] == docs[kv_idx], alibi_slopes=slopes
    )
    arch = arch_from_name("sm_80")
    config = family_named("forward_sm80").default_config(problem.spec, arch)
    tables = {"mask": problem.mask, "score": problem.score}
    _, _, report = emulate_forward(problem.spec, config, arch, q, k, v, **tables)
    assert {finding.kind for finding in report.findings} == {"out-of-bounds"}
    assert all("'docs'" in finding.message for finding in report.findings)
