"""Calls that repeat: what they cost, counted, and that whatever differs from the call before is noticed."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import gc
import os
import sys
from collections import Counter

import pytest
import torch
from helpers_attention import FakeBackend, qkv

from flashsmith.generator.errors import TensorError, TensorTypeError, UnsupportedError
from flashsmith.runtime import attention as module
from flashsmith.runtime.attention import attention, reset, use_backend


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request):
    backend = FakeBackend(request.param)
    with use_backend(backend):
        yield backend


@pytest.fixture(params=["checked", "looked up"])
def way(request, monkeypatch):
    """How a repeated call finds its plan: by torch's check, or by all its facts, as with a torch that has none."""
    if request.param == "looked up":
        monkeypatch.setattr(module, "tensor_check", lambda *_: None)
    return request.param


def warm(q, k, v, **call):
    """Makes `attention(q, k, v, **call)` a call that repeats: one prepares, one remembers, one is like the others."""
    for _ in range(3):
        attention(q, k, v, **call)


def calls_of(function):
    """How often each function, Python's (by name) or C's, is called below `function`: the fewest of many runs.

    The rest may have got an output at a new address, whose tensor map is encoded once.
    """

    def note(frame, event, argument):
        if event in ("call", "c_call"):
            counts[frame.f_code.co_name if event == "call" else argument.__name__] += 1

    found = []
    gc.disable()
    try:
        for _ in range(20):
            counts = Counter()
            sys.setprofile(note)
            function()
            sys.setprofile(None)
            counts.subtract(["<lambda>", "setprofile"])
            found.append(+counts)
    finally:
        sys.setprofile(None)
        gc.enable()
    return min(found, key=Counter.total)


# ---- Cost --------------------------------------------------------------------------------------------------------


class Silent(FakeBackend):
    """Its stream (77), device (0) and capture (none) are C functions, as with a GPU."""

    current_stream = staticmethod({0: 77}.__getitem__)
    current_device = is_capturing = staticmethod([].__len__)

    def make(self, spec, config, family):
        kernel = super().make(spec, config, family)
        kernel.launch = lambda grid, threads, smem_bytes, stream, packed: None
        return kernel


#: In Python: `attention`, `Plan.launch` and the driver's launch, all told. In C: the look-up of the flags, the check,
#: q's, k's and v's address, the device, the allocation, the stream, the output's address; the buffer's pop and append,
#: the packing. A kernel with maps: two dictionaries, of maps and of counters, and whether a graph is being captured.
MOST_CALLS = {"sm_80": 3 + 12, "sm_90": 3 + 12 + 3 + 3}


@pytest.mark.skipif(sys.version_info[:2] < (3, 11), reason="older versions call otherwise")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_how_many_calls_a_repeated_call_makes(arch):
    """Time depends on the machine, the number of calls does not: each costs 30 to 100 ns."""
    q, k, v = qkv()
    with torch.no_grad(), use_backend(Silent(arch)):
        warm(q, k, v, causal=True)
        plain = calls_of(lambda: attention(q, k, v, causal=True))
        warm(q, k, v, causal=True, return_lse=True)
        lse = calls_of(lambda: attention(q, k, v, causal=True, return_lse=True))
    assert plain.total() <= MOST_CALLS[arch], plain
    assert lse.total() <= MOST_CALLS[arch] + 2, lse  # the allocation, the address
    assert not {"_key", "_remembered", "_first_call", "empty", "stride", "is_neg"} & {*plain, *lse}


# ---- What differs is noticed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: x[:1], TensorError, "same batch size"),
        (lambda x: x[0], TensorError, "4 dimensions"),
        (lambda x: x.bfloat16(), TensorError, "one dtype"),
        (lambda x: x.to("meta"), TensorError, "plain tensor|one device"),
        (lambda x: x.to_sparse(), TensorError, "dense tensor"),
        (lambda x: x.clone().requires_grad_(), UnsupportedError, "forward only"),
        (lambda x: x.numpy(), TensorTypeError, "torch tensor"),
        (lambda x: None, TensorTypeError, "NoneType"),
    ],
    ids=["batch", "rank", "dtype", "device", "layout", "gradient", "array", "None"],
)
def test_another_kind_of_tensor_is_refused(gpu, way, position, change, error, words):
    tensors = list(qkv())
    warm(*tensors)
    launched = len(gpu.launches)
    tensors[position] = change(tensors[position])
    with pytest.raises(error, match=words):
        attention(*tensors)
    assert len(gpu.launches) == launched


def test_a_gradient_that_did_not_matter_before_is_refused_when_it_does(gpu, way):
    q, k, v = qkv()
    q.requires_grad_()
    with torch.no_grad():
        warm(q, k, v)
    with pytest.raises(UnsupportedError, match="forward only"):
        attention(q, k, v)


def test_a_tensor_whose_memory_was_freed_is_refused(gpu, way):
    """Its shape and strides stay, and its address is 0."""
    q, k, v = qkv()
    warm(q, k, v)
    launched = len(gpu.launches)
    k.untyped_storage().resize_(0)
    with pytest.raises(TensorError, match="k must be a plain tensor with data of its own"):
        attention(q, k, v)
    assert len(gpu.launches) == launched


def test_transforms_are_refused_when_warm(gpu, way):
    q, k, v = qkv()
    warm(q, k, v)
    launched = len(gpu.launches)
    with pytest.raises(TensorError, match=r"outside of torch\.func transforms"):
        torch.func.vmap(attention)(q[None], k[None], v[None])
    with pytest.raises(TensorError, match=r"outside of torch\.func transforms"):
        torch.func.grad(lambda x: attention(x, k, v).sum())(q)
    assert len(gpu.launches) == launched


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("fault", ["address", "negative"])
def test_what_cannot_be_read_in_place_is_copied(gpu, way, position, fault):
    tensors = list(qkv())
    warm(*tensors)
    x = tensors[position]
    if fault == "address":
        tensors[position] = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    else:
        tensors[position] = torch._neg_view(-x)
    for _ in range(3):
        attention(*tensors)
        assert gpu.launches[-1].values["qkv"[position]] not in (x.data_ptr(), tensors[position].data_ptr())


def test_another_current_device_is_guarded(gpu, way):
    q, k, v = qkv()
    warm(q, k, v)
    gpu.guards.clear()
    gpu.device = 1
    attention(q, k, v)
    assert gpu.guards == [0]


def test_classes_of_calls_that_take_turns(gpu, way, monkeypatch):
    """Lengths, strides and flags in any order: each launch is its own call's. Checks are made once per class."""
    made = []
    check = module.tensor_check
    monkeypatch.setattr(module, "tensor_check", lambda *tensors: made.append(tensors) or check(*tensors))
    q, k, v = qkv()
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    kinds = [(q, {}), (q[:, :20], {}), (turned, {}), (q, {"causal": True}), (q, {"softmax_scale": 0.5})]
    for one, call in kinds * 4:
        out = attention(one, k, v, **call)
        launch = gpu.launches[-1]
        assert out.shape == one.shape and out.is_contiguous()
        assert launch.values["q"] == one.data_ptr() and launch.values["seqlen_q"] == one.shape[1]
        assert launch.values["q_stride_s"] == one.stride(1)
        assert (launch.spec.mask is not None) == call.get("causal", False)
        assert launch.values["softmax_scale"] == call.get("softmax_scale", 0.125)
    assert way == "looked up" or len(made) == len(kinds)


def test_one_tensor_may_be_given_twice(gpu, way):
    q, k, _ = qkv()
    warm(q, k, k)
    warm(q, k, k.clone())
    attention(q, k, k)
    assert gpu.launches[-1].values["v"] == k.data_ptr()


def test_another_mode_of_torch_soon_costs_no_more(gpu, monkeypatch):
    """An inference tensor is of another kind to torch's check, though not to a launch."""
    q, k, v = qkv()
    warm(q, k, v)
    looked_up = []
    remembered = module._remembered
    monkeypatch.setattr(module, "_remembered", lambda *call: looked_up.append(call) or remembered(*call))
    with torch.inference_mode():
        for _ in range(4):
            assert attention(q, k, v).is_inference()
    for _ in range(4):
        assert not attention(q, k, v).is_inference()
    assert len(looked_up) == 2


# ---- What is kept ------------------------------------------------------------------------------------------------


def test_reset_forgets_the_recent_call_too(gpu, monkeypatch):
    q, k, v = qkv()
    warm(q, k, v)
    assert module._recent
    seen = []
    first_call = module._first_call
    monkeypatch.setattr(module, "_first_call", lambda *call: seen.append(call) or first_call(*call))
    attention(q, k, v)
    assert not seen
    reset()
    attention(q, k, v)
    assert len(seen) == 1


def test_a_reset_between_look_up_and_note_is_not_undone(gpu, monkeypatch):
    q, k, v = qkv()
    attention(q, k, v)
    check = module.tensor_check
    monkeypatch.setattr(module, "tensor_check", lambda *tensors: reset() or check(*tensors))
    attention(q, k, v)
    assert not module._recent and not module._plans


def test_recent_calls_are_bounded(gpu, monkeypatch):
    monkeypatch.setattr(module, "MAX_PLANS", 3)
    q, k, v = qkv()
    for softcap in range(1, 7):
        warm(q, k, v, softcap=softcap)
    assert len(module._recent) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_late_has_no_recent_call(gpu):
    warm(*qkv())
    child = os.fork()
    if child == 0:
        os._exit(len(module._recent))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(module._recent) == 1
