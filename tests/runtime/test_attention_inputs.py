"""What a call takes and refuses: tensors, gradients, forms of its arguments. A stand-in records a GPU's launches."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import logging
import math

import numpy
import pytest
import torch
from helpers_attention import FakeBackend, qkv

from flashsmith.generator.errors import ArchError, SpecError, TensorError, TensorTypeError, TraceError, UnsupportedError
from flashsmith.runtime import tensors
from flashsmith.runtime.attention import attention, last_plan, use_backend


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request):
    backend = FakeBackend(request.param)
    with use_backend(backend):
        yield backend


def test_bad_input_is_refused_on_a_warm_path_too(gpu):
    q, k, v = qkv()
    attention(q, k, v)
    with pytest.raises(TensorError, match="same length"):
        attention(q, k, v[:, :30])
    with pytest.raises(TensorError, match="one dtype"):
        attention(q, k.bfloat16(), v)
    for array in (q.numpy(), q.tolist(), None):
        with pytest.raises(TensorTypeError, match=rf"q must be a torch tensor .*{type(array).__name__}") as caught:
            attention(array, k, v)
        assert isinstance(caught.value, TensorError) and isinstance(caught.value, TypeError)
    with pytest.raises(TensorTypeError, match=r"alibi_slopes must be .* list"):
        attention(q, k, v, alibi_slopes=[1.0] * 4)
    with pytest.raises(SpecError, match="softmax_scale"):
        attention(q, k, v, softmax_scale=math.nan)
    with pytest.raises(SpecError, match="window_size"):
        attention(q, k, v, window_size=(1.5, 0))
    with pytest.raises(TensorError, match="alibi_slopes"):
        attention(q, k, v, alibi_slopes=torch.ones(3))
    with pytest.raises(TraceError):
        attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx if q_idx > 3 else q_idx)
    assert len(gpu.launches) == 1


class Wrapper(torch.Tensor):
    """A tensor that holds another, as DTensor and quantised tensors do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Named(torch.Tensor):
    """A subclass with data of its own."""


@pytest.mark.parametrize("warm", [False, True])
def test_tensors_without_data_of_their_own_are_refused(gpu, warm):
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = qkv()
    if warm:
        attention(q, k, v)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        with pytest.raises(TensorError, match=r"q must be a plain tensor .* FakeTensor on cpu"):
            attention(*fake)
    with pytest.raises(TensorError, match=r"k must be a plain tensor .* Wrapper on cpu"):
        attention(q, Wrapper(k), v)
    with pytest.raises(TensorError, match=r"plain tensor .*outside of torch\.func transforms"):
        torch.func.vmap(attention)(q[None], k[None], v[None])
    with pytest.raises(TensorError, match=r"plain tensor .*outside of torch\.func transforms"):
        torch.func.grad(lambda x: attention(x, k, v).sum())(q)
    assert len(gpu.launches) == warm


def test_subclasses_with_data_and_parameters_are_taken(gpu):
    q, k, v = qkv()
    with torch.no_grad():
        for _ in range(2):
            attention(torch.nn.Parameter(q), k, v)
            attention(q, k.as_subclass(Named), v)
    assert len(gpu.launches) == 4


def test_a_gradient_is_refused_whenever_it_is_wanted(gpu):
    q, k, v = qkv()
    attention(q, k, v)
    v.requires_grad_()
    with pytest.raises(UnsupportedError, match=r"forward only.*no_grad.*detach"):
        attention(q, k, v)
    with torch.no_grad():
        attention(q, k, v)
    attention(q, k, v.detach())
    slopes = torch.ones(4)
    attention(q, k, v.detach(), alibi_slopes=slopes)
    slopes.requires_grad_()
    with torch.no_grad():
        attention(q, k, v.detach(), alibi_slopes=slopes)
    with pytest.raises(UnsupportedError, match="forward only"):
        attention(q, k, v.detach(), alibi_slopes=slopes)
    assert len(gpu.launches) == 5


def test_without_a_gpu_cpu_tensors_are_sent_to_the_emulator():
    with pytest.raises(
        TensorError, match=r"on cpu\. Move them with \.cuda\(\).*flashsmith emulate.*emulated_attention"
    ):
        attention(*qkv())


@pytest.mark.parametrize("empty", [{"b": 0}, {"sq": 0}, {"sk": 0}])
def test_empty_tensors(gpu, empty):
    q, k, v = qkv(**empty)
    for _ in range(2):
        out, lse = attention(q, k, v, return_lse=True)
        assert out.shape == q.shape and (out == 0).all()
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and (lse == -math.inf).all()
        assert attention(q, k, v).shape == q.shape
    assert not gpu.launches and not gpu.loads
    assert last_plan().cubin_key == ""


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("fault", ["inner stride", "pitch", "address", "negative"])
def test_unreadable_inputs_are_copied_and_said_so_once(gpu, caplog, monkeypatch, name, fault):
    monkeypatch.setattr(tensors, "_logged_copies", set())
    arguments = dict(zip("qkv", qkv(), strict=True))
    good = arguments[name]
    b, s, h, d = good.shape
    if fault == "inner stride":
        bad = torch.stack([good, good], -1).view(b, s, h, 2 * d)[..., ::2]
    elif fault == "pitch":
        bad = torch.cat([good, good[..., :1]], -1)[..., :d]
    elif fault == "address":
        bad = torch.cat([good.flatten()[:1], good.flatten()])[1:].view(good.shape)
    else:
        bad = torch._neg_view(-good)
    attention(**arguments)
    arguments[name] = bad
    before = bad.clone()
    with caplog.at_level(logging.WARNING, logger="flashsmith"):
        for _ in range(3):
            attention(**arguments)
    assert len([r for r in caplog.records if r.name == "flashsmith.tensors"]) == 1
    values = gpu.launches[-1].values
    assert values[name] != bad.data_ptr() and values[name] % 16 == 0
    assert values[f"{name}_stride_s"] == h * d
    assert torch.equal(bad, before)


def test_a_window_in_any_form(gpu):
    q, k, v = qkv()
    for window in ((3, 0), [3, 0], torch.tensor([3, 0]), (3, None)):
        attention(q, k, v, causal=True, window_size=window)
    assert len({launch.spec for launch in gpu.launches}) == 1
    assert all(launch.values["mask_left"] == 3 for launch in gpu.launches)
    mutable = (torch.tensor(3), torch.tensor(0))
    attention(q, k, v, causal=True, window_size=mutable)
    mutable[0].add_(2)
    attention(q, k, v, causal=True, window_size=mutable)
    assert gpu.launches[-1].values["mask_left"] == 5


def test_causal_in_any_form(gpu):
    q, k, v = qkv()
    flag = torch.tensor(True)
    attention(q, k, v, causal=flag)
    flag.fill_(False)
    attention(q, k, v, causal=flag)
    attention(q, k, v, causal=1)
    attention(q, k, v, causal=numpy.bool_(False))
    assert [launch.spec.mask is not None for launch in gpu.launches] == [True, False, True, False]


@pytest.mark.parametrize("causal", ["no", 2, -1, 1.0, None, [True], torch.tensor([True]), torch.tensor(1.0)], ids=repr)
def test_a_causal_that_is_no_flag_is_refused(gpu, causal):
    with pytest.raises(SpecError, match=r"causal must be True or False, but got .*Pass one of the two"):
        attention(*qkv(), causal=causal)


def test_a_gpu_too_old_is_named_with_what_it_needs():
    class Old(FakeBackend):
        def arch(self, device):
            from flashsmith.generator.arch import arch_from_cc

            return arch_from_cc((7, 5))

    with use_backend(Old()), pytest.raises(ArchError, match=r"8\.0 or newer.*found 7\.5.*scaled_dot_product_attention"):
        attention(*qkv(dtype=torch.bfloat16))
