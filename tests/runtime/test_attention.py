"""The path of a call, on CPU tensors: a stand-in records the launches of a GPU, or runs them in the emulator."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import logging
import math
import subprocess
import sys
import threading
import timeit
import types

import pytest
import torch
from helpers_attention import Device, FakeBackend, qkv

import flashsmith
from flashsmith.generator.errors import (
    ArchError,
    CaptureError,
    SpecError,
    TensorError,
    TraceError,
    UnsupportedError,
)
from flashsmith.runtime import attention as module
from flashsmith.runtime import tensors
from flashsmith.runtime.attention import attention, explain, last_plan, reset, use_backend


@pytest.fixture
def gpu():
    backend = FakeBackend()
    with use_backend(backend):
        yield backend


def names_of(call):
    return [launch.values[name] for launch in call for name in ("q", "k", "v")]


def test_the_public_name_is_the_function():
    assert flashsmith.attention is attention


def test_a_repeated_call_only_launches(gpu, monkeypatch):
    q, k, v = qkv()
    first = attention(q, k, v, causal=True)
    assert first.shape == (2, 33, 4, 64) and first.is_contiguous() and first.dtype == torch.float16
    monkeypatch.setattr(module, "_first_call", pytest.fail)
    again = attention(q, k, v, causal=True)
    one, two = gpu.launches
    assert again.data_ptr() != first.data_ptr()
    assert one.values | {"o": 0} == two.values | {"o": 0}
    assert two.values["o"] == again.data_ptr() and two.values["q"] == q.data_ptr()
    assert two.values["lse"] == 0  # nobody asked for it: no memory, no write
    assert two.stream == gpu.stream
    assert len(gpu.loads) == 1


def test_the_lse_is_allocated_where_it_is_asked_for(gpu):
    q, k, v = qkv(dv=32)
    for _ in range(2):
        out, lse = attention(q, k, v, return_lse=True)
        assert out.shape == (2, 33, 4, 32)
        assert lse.shape == (2, 4, 33) and lse.dtype == torch.float32 and lse.is_contiguous()
        assert gpu.launches[-1].values["lse"] == lse.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True},
        {"window_size": (3, -1)},
        {"softcap": 5.0},
        {"softmax_scale": 0.5},
        {"alibi_slopes": torch.ones(4)},
        {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx != kv_idx},
        {"score_mod": lambda s, b, h, q_idx, kv_idx: s + 1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_argument_matters(gpu, change):
    q, k, v = qkv()
    attention(q, k, v)
    attention(q, k, v, **change)
    attention(q, k, v)
    plain, changed, plain_again = ((x.spec, {k: v for k, v in x.values.items() if k != "o"}) for x in gpu.launches)
    assert changed != plain and plain_again == plain


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[:, :20], k, v),
        lambda q, k, v: (q, k[:, :40], v[:, :40]),
        lambda q, k, v: (q, k[:, :, :1], v[:, :, :1]),
        lambda q, k, v: (q, k, v[..., :32]),
        lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
        lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16()),
    ],
)
def test_shapes_strides_and_dtypes_matter(gpu, change):
    q, k, v = qkv()
    attention(q, k, v)
    changed = change(q, k, v)
    for _ in range(2):
        out = attention(*changed)
        assert out.shape == (*changed[0].shape[:3], changed[2].shape[3]) and out.is_contiguous()
        assert out.dtype == changed[0].dtype
        for name, tensor in zip("qkv", changed, strict=True):
            assert gpu.launches[-1].values[f"{name}_stride_s"] == tensor.stride(1)
            assert gpu.launches[-1].values[name] == tensor.data_ptr()


def test_bad_input_is_refused_on_a_warm_path_too(gpu):
    q, k, v = qkv()
    attention(q, k, v)
    with pytest.raises(TensorError, match="same length"):
        attention(q, k, v[:, :30])
    with pytest.raises(TensorError, match="one dtype"):
        attention(q, k.bfloat16(), v)
    with pytest.raises(TensorError, match=r"numpy\.ndarray"):
        attention(q.numpy(), k, v)
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


def test_tensors_of_another_device_than_the_current_one(gpu):
    q, k, v = qkv()
    attention(q, k, v)
    gpu.guards.clear()
    attention(q, k, v)
    assert gpu.guards == []
    gpu.device = 1
    attention(q, k, v)
    assert gpu.guards == [0]
    assert len(gpu.launches) == 3 and len(gpu.loads) == 1


def test_a_first_call_inside_a_capture_says_warm_up_first(gpu):
    q, k, v = qkv()
    gpu.capturing = True
    with pytest.raises(CaptureError, match="Warm up first"):
        attention(q, k, v)
    gpu.capturing = False
    attention(q, k, v)
    gpu.capturing = True
    attention(q, k, v)
    attention(*qkv(sq=20))
    assert len(gpu.launches) == 3 and len(gpu.loads) == 1


def test_last_plan_names_config_and_source(gpu):
    q, k, v = qkv()
    attention(q, k, v, causal=True)
    record = last_plan()
    assert record.family == "forward_sm80" and record.arch == "sm_90"
    assert record.config == gpu.launches[0].config
    assert record.source in ("user", "packaged", "nearest", "default")
    assert record.cubin_key == f"key of {record.config}"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(last_plan()))
    thread.start()
    thread.join()
    assert seen == [None]


def test_explain_tells_without_launching(gpu):
    q, k, v = qkv()
    record = explain(q, k, v, window_size=[3, 0], return_lse=True)
    assert not gpu.launches
    attention(q, k, v, window_size=[3, 0])
    assert last_plan() == record


def test_a_user_record_is_used_after_reset(gpu, monkeypatch):
    from flashsmith.runtime import preparation
    from flashsmith.runtime.store import Resolution

    q, k, v = qkv()
    attention(q, k, v)
    family = module.last_plan().family
    tuned = next(
        c
        for c in flashsmith.generator.families.family_named(family).space(gpu.launches[0].spec, gpu.arch(0))
        if c != gpu.launches[0].config
    )
    monkeypatch.setattr(preparation, "resolve", lambda *_: Resolution(tuned, "user", None, "tuned here"))
    attention(q, k, v)
    assert last_plan().config != tuned
    reset()
    attention(q, k, v)
    assert last_plan().config == tuned and last_plan().source == "user" and last_plan().note == "tuned here"
    assert gpu.launches[-1].config == tuned


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
    assert [launch.spec.mask is not None for launch in gpu.launches] == [True, False, True]


# ---- Captured values that change between calls ------------------------------------------------------------------


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
    specs = [launch.spec for launch in gpu.launches]
    assert specs[0] == specs[1] != specs[2]
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


def test_plans_are_bounded_and_the_oldest_goes_first(gpu, monkeypatch):
    monkeypatch.setattr(module, "MAX_PLANS", 3)
    q, k, v = qkv()
    for sq in range(1, 6):
        attention(q[:, :sq], k, v)
    assert len(module._plans) == 3
    monkeypatch.setattr(module, "_first_call", pytest.fail)
    for sq in (3, 4, 5):
        attention(q[:, :sq], k, v)


def test_a_call_that_has_no_key_is_not_remembered(gpu):
    q, k, v = qkv()
    call = {"causal": False, "window_size": (-1, -1), "alibi_slopes": None, "mask_mod": None, "score_mod": None}
    assert module._first_call(q, k, v, call, False, None).shape == q.shape
    assert not module._plans


def test_threads_that_call_first_together_load_one_kernel(gpu):
    q, k, v = qkv()
    gate = threading.Barrier(8)
    errors = []

    def call(sq):
        gate.wait()
        try:
            attention(q[:, :sq], k, v, causal=True)
        except BaseException as error:  # noqa: BLE001 (a thread's failure must reach the test)
            errors.append(error)

    threads = [threading.Thread(target=call, args=(1 + i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(gpu.loads) == 1 and len(gpu.launches) == 8
    assert sorted(launch.values["seqlen_q"] for launch in gpu.launches) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_gpu_too_old_is_named_with_what_it_needs():
    class Old(FakeBackend):
        def arch(self, device):
            from flashsmith.generator.arch import arch_from_cc

            return arch_from_cc((7, 5))

    with use_backend(Old()), pytest.raises(ArchError, match=r"8\.0 or newer.*found 7\.5.*scaled_dot_product_attention"):
        attention(*qkv(dtype=torch.bfloat16))


def test_importing_starts_no_cuda_and_forks_well():
    code = """
import os, torch, flashsmith
flashsmith.attention
assert not torch.cuda.is_initialized()
from flashsmith.runtime import driver
assert driver._library is None and not driver._searched
pid = os.fork()
if pid == 0:
    try:
        flashsmith.attention(*[torch.zeros(1, 8, 1, 8).half()] * 3)
    except flashsmith.generator.errors.TensorError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_child_forked_late_checks_its_first_call(gpu):
    import os

    q, k, v = qkv()
    attention(q, k, v)
    child = os.fork()
    if child == 0:
        os._exit(len(module._plans))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(module._plans) == 1


def test_the_host_cost_of_a_repeated_call(gpu):
    """A loose bound against accidents (a sync, a trace, a validation); benchmarks/host_cost.py measures it well."""
    q, k, v = qkv()
    kernel_cost = []

    def launch(*_):
        kernel_cost.append(None)

    attention(q, k, v, causal=True)
    next(iter(module._plans.values()))._launch = launch
    seconds = min(timeit.repeat(lambda: attention(q, k, v, causal=True), number=200, repeat=5)) / 200
    assert len(kernel_cost) == 1000
    assert seconds < 60e-6


# ---- The whole path, to the result ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"causal": True},
        {"window_size": (7, 3), "softcap": 2.0, "softmax_scale": 0.2},
        {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.8])},
    ],
    ids=["plain", "causal", "window and softcap", "alibi"],
)
def test_attention_through_the_emulator(call):
    emulator = Device("emulator")
    q, k, v = qkv(b=1, dtype=torch.bfloat16)
    out, _ = emulator.check(q, k, v, **call)
    assert torch.equal(emulator.attention(q, k, v, **call), out)
