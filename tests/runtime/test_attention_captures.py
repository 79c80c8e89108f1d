"""Functions whose captured values change between calls. A stand-in records the launches of a GPU."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import types

import pytest
import torch
from helpers_attention import FakeBackend, qkv

from flashsmith.generator.errors import TensorError
from flashsmith.runtime import attention as module
from flashsmith.runtime.attention import attention, use_backend


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request):
    backend = FakeBackend(request.param)
    with use_backend(backend):
        yield backend


def test_a_closure_variable_that_changes_is_followed_without_a_new_kernel(gpu):
    q, k, v = qkv()
    w = 3

    def mask(b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < w

    attention(q, k, v, mask_mod=mask)
    w = 5
    attention(q, k, v, mask_mod=mask)
    w = 3
    attention(q, k, v, mask_mod=mask)
    assert [launch.values["mask_w"] for launch in gpu.launches] == [3, 5, 3]
    assert len(gpu.loads) == 1


def test_a_captured_tensor_is_read_at_its_present_address(gpu):
    q, k, v = qkv()
    bias = torch.zeros(47)

    def score(s, b, h, q_idx, kv_idx):
        return s + bias[kv_idx]

    attention(q, k, v, score_mod=score)
    bias += 1
    attention(q, k, v, score_mod=score)
    old, bias = bias, torch.ones(47)
    attention(q, k, v, score_mod=score)
    bias = torch.ones(47).half()
    attention(q, k, v, score_mod=score)
    bias = torch.ones(94)[::2]
    attention(q, k, v, score_mod=score)
    addresses = [launch.values["score_bias"] for launch in gpu.launches]
    assert addresses[0] == addresses[1] == old.data_ptr() != addresses[2]
    assert [launch.values["score_bias_stride_0"] for launch in gpu.launches] == [1, 1, 1, 1, 2]
    assert len(gpu.loads) == 2  # fp32 and fp16


def test_each_call_gets_the_tensors_of_its_own_closure(gpu):
    q, k, v = qkv()

    def biased(one, two):
        return lambda s, b, h, q_idx, kv_idx: s + one[kv_idx] - two[q_idx]

    pairs = [(torch.zeros(47), torch.zeros(47)) for _ in range(3)]
    for one, two in pairs:
        attention(q, k, v, score_mod=biased(one, two), alibi_slopes=torch.ones(4))
    found = [(x.values["score_one"], x.values["score_two"]) for x in gpu.launches]
    assert found == [(one.data_ptr(), two.data_ptr()) for one, two in pairs]
    # Other lengths, and so another plan, for a function that was traced with other tensors.
    one, two = torch.zeros(47), torch.zeros(47)
    attention(q[:, :9], k, v, score_mod=biased(one, two), alibi_slopes=torch.ones(4))
    assert (gpu.launches[-1].values["score_one"], gpu.launches[-1].values["score_two"]) == (
        one.data_ptr(),
        two.data_ptr(),
    )
    # One tensor in both places is another class of calls: its plan must not serve two.
    attention(q, k, v, score_mod=biased(pairs[0][0], pairs[0][0]), alibi_slopes=torch.ones(4))
    one, two = pairs[1]
    attention(q, k, v, score_mod=biased(one, two), alibi_slopes=torch.ones(4))
    assert (gpu.launches[-1].values["score_one"], gpu.launches[-1].values["score_two"]) == (
        one.data_ptr(),
        two.data_ptr(),
    )


def test_a_function_whose_captures_cannot_be_compared_is_traced_each_time(gpu):
    q, k, v = qkv()
    settings = types.ModuleType("settings")  # its attributes may change between calls
    settings.limit = 3
    bias = torch.zeros(47)

    def score(s, b, h, q_idx, kv_idx):
        return s + bias[kv_idx] * settings.limit

    attention(q, k, v, score_mod=score)
    attention(q, k, v, score_mod=score)
    settings.limit = 5
    attention(q, k, v, score_mod=score)
    assert [launch.values["score_limit"] for launch in gpu.launches] == [3, 3, 5]
    assert all(launch.values["score_bias"] == bias.data_ptr() for launch in gpu.launches)
    assert not module._plans  # nothing to look such a call up by


def test_a_captured_tensor_elsewhere_or_too_small_is_refused(gpu):
    q, k, v = qkv()
    elsewhere = torch.zeros(47, device="meta")
    with pytest.raises(TensorError, match=r"captured tensor 'elsewhere' must be on cpu.* on meta.*\.to\(q\.device\)"):
        attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + elsewhere[kv_idx])
    short = torch.zeros(46)
    with pytest.raises(TensorError, match="at least 47 elements"):
        attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + short[kv_idx])
    import numpy

    host = numpy.zeros(47, dtype=numpy.float32)
    with pytest.raises(TensorError, match="ndarray"):
        attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + host[kv_idx])


def test_the_attributes_of_a_class_are_read_at_each_call(gpu):
    q, k, v = qkv()

    class Settings:
        limit = 3

    def mask(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + Settings.limit

    attention(q, k, v, mask_mod=mask)
    Settings.limit = 5
    attention(q, k, v, mask_mod=mask)
    assert [launch.values["mask_limit"] for launch in gpu.launches] == [3, 5]


@pytest.mark.parametrize("first", [True, False], ids=["first call", "repeated call"])
def test_a_captured_tensor_with_the_negative_bit_is_refused(gpu, first):
    q, k, v = qkv()
    bias = torch.randn(47)
    negated = torch.complex(torch.zeros(47), bias).conj().imag  # -bias, as a view
    assert negated.is_neg()
    contiguous = torch._neg_view(bias)
    for tensor in (bias, negated.resolve_neg()) if not first else ():
        attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + tensor[kv_idx])  # noqa: B023
    for tensor in (negated, contiguous):
        with pytest.raises(TensorError, match=r"captured tensor tensor must .* negative bit is set.*resolve_neg\(\)"):
            attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + tensor[kv_idx])  # noqa: B023


def test_a_captured_sparse_tensor_is_refused_by_its_layout(gpu):
    q, k, v = qkv()
    sparse = torch.eye(47).to_sparse()
    with pytest.raises(TensorError, match=r"captured tensor sparse .* layout is sparse_coo.*to_dense\(\)"):
        attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + sparse[q_idx, kv_idx])


def test_slopes_that_are_no_plain_memory_are_refused(gpu):
    q, k, v = qkv()
    slopes = torch.rand(q.shape[2])
    attention(q, k, v, alibi_slopes=slopes)
    with pytest.raises(TensorError, match=r"alibi_slopes must .* negative bit is set"):
        attention(q, k, v, alibi_slopes=torch._neg_view(slopes))
    with pytest.raises(TensorError, match=r"alibi_slopes must .* layout is sparse_coo"):
        attention(q, k, v, alibi_slopes=slopes.to_sparse())
