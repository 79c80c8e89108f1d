"""Torch's inner entry points: what they must do, and that a torch in which they do not is noticed."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalCall=false

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers_attention import qkv

from flashsmith.runtime import torch_internals
from flashsmith.runtime.torch_internals import allocator, never_alike, tensor_check

CPU = torch.device("cpu")
REAL = torch_internals._internal_guards()


@pytest.fixture(autouse=True)
def afresh():
    """Each test asks torch anew, and leaves no answer behind."""
    for cached in (torch_internals._tensor_guards, torch_internals._allocates):
        cached.cache_clear()
    yield
    for cached in (torch_internals._tensor_guards, torch_internals._allocates):
        cached.cache_clear()


def replace(monkeypatch, **functions):
    monkeypatch.setattr(torch_internals, "_internal_guards", lambda: SimpleNamespace(**functions))


# ---- The check ---------------------------------------------------------------------------------------------------


def test_tensors_alike_are_accepted_wherever_they_are():
    check = tensor_check(*qkv())
    assert check is not None and check(*qkv(seed=5)) is True
    q, k, v = qkv()
    assert check(q[:, :, :, :].view_as(q), k, v)
    assert not never_alike(q, k, v)


@pytest.mark.parametrize("position", range(3))
def test_what_differs_is_refused(position):
    given = qkv()
    check = tensor_check(*given)
    x = given[position]
    padded = torch.cat([x, x], -1)[..., : x.shape[3]]
    for other in (x[:1], x[:, :5], x[..., :8], x[0], padded, x.bfloat16(), x.float(), x.to("meta"), x.to_sparse(),
                  x.view(torch.int16), torch._neg_view(x), torch._efficientzerotensor(x.shape, dtype=x.dtype),
                  torch.nn.Parameter(x), x.clone().requires_grad_(), x.numpy(), x.tolist(), None):  # fmt: skip
        assert not check(*given[:position], other, *given[position + 1 :])


def test_no_check_is_made_where_it_could_not_hold():
    q, k, v = qkv()
    assert tensor_check(q, k, k) is None and tensor_check(q, q, v) is None and tensor_check(q, k, q) is None
    # Whether a gradient is wanted depends on the mode at the time of the call.
    with torch.no_grad():
        assert tensor_check(q, k.requires_grad_(), v) is None


BLIND_SPOTS = {
    "size": lambda x: x.shape,
    "stride": lambda x: x.stride(),
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "class": type,
    "gradient": lambda x: x.requires_grad,
    "negative bit": lambda x: x.is_neg(),
}


class Guards:
    """Torch's guards in Python, but for the fact named `blind`."""

    blind = ""

    def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
        self.seen = [self.facts(x) for x in tensors]

    def facts(self, x):
        if not isinstance(x, torch.Tensor):
            return None
        return [read(x) for name, read in BLIND_SPOTS.items() if name != self.blind]

    def check(self, *tensors):
        return [self.facts(x) for x in tensors] == self.seen


@pytest.mark.parametrize("blind", BLIND_SPOTS)
def test_a_torch_that_does_not_tell_tensors_apart_is_not_asked(monkeypatch, blind):
    replace(monkeypatch, TensorGuards=type("Blind", (Guards,), {"blind": blind}))
    assert tensor_check(*qkv()) is None


def test_a_torch_with_other_guards_is_not_asked(monkeypatch):
    replace(monkeypatch, TensorGuards=Guards)
    assert tensor_check(*qkv()) is not None
    for other in ({}, {"TensorGuards": lambda *tensors: None}, {"TensorGuards": lambda *_, **__: None}):
        torch_internals._tensor_guards.cache_clear()
        replace(monkeypatch, **other)
        assert tensor_check(*qkv()) is None


@pytest.mark.parametrize("torch_is", ["as it is", "older"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=lambda mode: mode.__name__)
def test_torch_may_be_asked_first_in_any_mode(monkeypatch, mode, torch_is):
    if torch_is == "older":  # a gradient counted where the mode wants it
        monkeypatch.setitem(BLIND_SPOTS, "gradient", lambda x: x.requires_grad and torch.is_grad_enabled())
        replace(monkeypatch, TensorGuards=Guards)
    with mode():
        assert tensor_check(*qkv()) is not None


# ---- Allocation --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["internal", "absent", "other signature"])
def torch_has(request, monkeypatch):
    if request.param == "absent":
        replace(monkeypatch)
    elif request.param == "other signature":
        replace(monkeypatch, _empty_strided_cpu=lambda sizes: torch.empty(sizes))
    return request.param


@pytest.mark.parametrize("inference", [False, True])
def test_an_allocation_is_what_torch_empty_gives(torch_has, inference):
    empty = allocator(CPU)
    assert (empty is REAL._empty_strided_cpu) == (torch_has == "internal")
    with torch.inference_mode(inference):
        made, public = empty((2, 3, 4, 8), (96, 32, 8, 1), torch.bfloat16), torch.empty(2, 3, 4, 8).bfloat16()
    for fact in ("shape", "dtype", "device", "requires_grad", "layout"):
        assert getattr(made, fact) == getattr(public, fact)
    assert made.stride() == public.stride() and made.is_inference() == inference and type(made) is torch.Tensor


def test_another_kind_of_device_is_asked_publicly():
    made = allocator(torch.device("meta"))((2, 3), (3, 1), torch.float16)
    assert made.is_meta and made.shape == (2, 3) and made.dtype == torch.float16


@pytest.mark.gpu
def test_on_a_gpu():
    q, k, v = qkv(device="cuda")
    check = tensor_check(q, k, v)
    assert check is not None and check(q.clone(), k.clone(), v.clone()) and not check(q.cpu(), k, v)
    made = allocator(q.device)((2, 3), (3, 1), torch.float16)
    assert made.device == q.device and made.shape == (2, 3) and made.stride() == (3, 1) and made.dtype == torch.float16
    if torch.cuda.device_count() > 1:
        assert not check(q.to("cuda:1"), k, v) and not check(q, k.to("cuda:1"), v)
        with torch.cuda.device(1):
            assert allocator(torch.device("cuda", 1))((2,), (1,), torch.float16).device.index == 1
