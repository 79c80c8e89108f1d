"""The path of a call, on CPU tensors: a stand-in records the launches of a GPU, or runs them in the emulator."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import subprocess
import sys
import threading
import timeit

import pytest
import torch
from helpers_attention import Device, FakeBackend, qkv

import flashsmith
from flashsmith.generator.errors import CaptureError
from flashsmith.runtime import attention as module
from flashsmith.runtime.attention import attention, explain, last_plan, reset, use_backend


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request):
    backend = FakeBackend(request.param)
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
    assert record.family == {"sm_80": "forward_sm80", "sm_90": "forward_sm90"}[gpu.arch_name]
    assert record.arch == gpu.arch_name
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
    monkeypatch.setattr(preparation, "choose_config", lambda *_, **__: Resolution(tuned, "user", None, "tuned here"))
    attention(q, k, v)
    assert last_plan().config != tuned
    reset()
    attention(q, k, v)
    assert last_plan().config == tuned and last_plan().source == "user" and last_plan().note == "tuned here"
    assert gpu.launches[-1].config == tuned


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
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_attention_through_the_emulator(call, arch):
    emulator = Device("emulator", arch)
    q, k, v = qkv(b=1, dtype=torch.bfloat16)
    out, _ = emulator.check(q, k, v, **call)
    assert torch.equal(emulator.attention(q, k, v, **call), out)
