"""flashsmith.attention on a GPU: streams, graphs, threads, devices, memory, large offsets. Few kernels, small ones."""

# pyright: reportArgumentType=false

from __future__ import annotations

import gc
import logging
import math
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from helpers_attention import Device, assert_right, qkv

import flashsmith
from flashsmith.generator.errors import CaptureError, TensorError, UnsupportedError
from flashsmith.generator.families import families_for
from flashsmith.runtime.attention import explain, last_plan, use_backend
from flashsmith.runtime.device import CudaBackend
from flashsmith.runtime.problem import problem_of
from flashsmith.runtime.verify import verify_config

pytestmark = pytest.mark.gpu
GPU = Device("cuda")
GIB = 1 << 30


def inputs(**sizes):
    return qkv(device="cuda", **{"b": 2, "sq": 200, "sk": 200, "h": 4, "hk": 2, **sizes})


def free_gib():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / GIB


def test_the_config_used_can_be_seen():
    q, k, v = inputs()
    flashsmith.attention(q, k, v, causal=True)
    record = last_plan()
    assert record is not None and record == explain(q, k, v, causal=True)
    assert record.family.startswith("forward_") and record.arch.startswith("sm_") and record.cubin_key
    assert record.source in ("user", "packaged", "nearest", "default")


def test_a_second_run_gives_the_same_bits():
    for sizes, call in (({}, {"causal": True}), ({"sq": 1000, "sk": 3000}, {}), ({"sq": 1, "sk": 777}, {})):
        q, k, v = inputs(**sizes)
        out, lse = flashsmith.attention(q, k, v, return_lse=True, **call)
        for _ in range(5):
            again, again_lse = flashsmith.attention(q, k, v, return_lse=True, **call)
            assert torch.equal(again, out) and torch.equal(again_lse, lse)


@pytest.mark.parametrize(
    "call", [{}, {"causal": True, "window_size": (900, -1), "softcap": 30.0}], ids=["plain", "mods"]
)
def test_default_and_other_configs_are_right(call):
    problem = problem_of(dtype="bf16", head_dim=64, **call)
    arch = CudaBackend().arch(torch.cuda.current_device())
    family = families_for(problem.spec, arch)[0]
    default = family.default_config(problem.spec, arch)
    space = family.space(problem.spec, arch)
    for config in (default, space[len(space) // 3], space[-1]):
        verdict = verify_config(problem, config, arch, device="cuda", family=family)
        assert verdict.ok, str(verdict)


# ---- Memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_memory_beyond_inputs_and_output_is_the_lse_alone(causal):
    q, k, v = inputs(b=4, sq=2048, sk=2048, h=8, hk=8)
    flashsmith.attention(q, k, v, causal=causal, return_lse=True)
    torch.cuda.synchronize()
    out_bytes, lse_bytes = q.numel() * 2, 4 * 8 * 2048 * 4
    for return_lse, expected in ((False, out_bytes), (True, out_bytes + lse_bytes)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = flashsmith.attention(q, k, v, causal=causal, return_lse=return_lse)
        assert torch.cuda.max_memory_allocated() - before == expected
        assert torch.cuda.memory_allocated() - before == expected
        del result


# ---- Sizes and offsets beyond 32 and 16 bits --------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["batch", "sequence"])
def test_strides_beyond_32_bits(axis):
    """Case 26: item 1 lies 2^31 elements behind item 0."""
    if free_gib() < 16:
        pytest.skip("needs 16 GiB of free GPU memory")
    step = 1 << 31
    big = torch.empty(step + 3 * 4096, dtype=torch.float16, device="cuda")
    strides = (step, 64, 64, 1) if axis == "batch" else (64, step, 64, 1)
    rows = 64 if axis == "batch" else 2
    views, dense = [], inputs(b=2 if axis == "batch" else 1, sq=rows, sk=rows, h=1, hk=1)
    for i, tensor in enumerate(dense):
        view = big.as_strided(tuple(tensor.shape), strides, i * 4096)
        view.copy_(tensor)
        views.append(view)
    assert torch.equal(flashsmith.attention(*views), flashsmith.attention(*dense))
    for view, tensor in zip(views, dense, strict=True):
        assert torch.equal(view, tensor)


def test_an_output_of_more_than_2_31_elements():
    """Case 26: the last rows are written at offsets beyond 32 bits."""
    if free_gib() < 16:
        pytest.skip("needs 16 GiB of free GPU memory")
    rows, heads = (1 << 20) + 100, 33
    q, k, v = inputs(b=1, sq=1, sk=16, h=heads, hk=heads)
    expected, lse = flashsmith.attention(q, k, v, return_lse=True)
    assert_right(expected, lse, q, k, v)
    # An expanded q and a dense one may be read by two families of kernels, whose last bits differ.
    for many in (q.expand(1, rows, heads, 64), q.expand(1, rows, heads, 64).contiguous()):
        out = flashsmith.attention(many, k, v)
        assert out.numel() > 1 << 31
        torch.testing.assert_close(out[:, :1], expected, rtol=0, atol=2e-3)
        assert torch.equal(out[:, -1], out[:, 0])
        assert bool((out[:, ::997] == out[:, :1]).all())
        del out


def test_more_than_65535_heads_in_a_batch():
    q, k, v = inputs(b=35_000, sq=1, sk=3, h=2, hk=1)
    out, lse = flashsmith.attention(q, k, v, return_lse=True)
    for part in (slice(0, 8), slice(32_760, 32_776), slice(34_992, 35_000)):
        assert_right(out[part], lse[part], q[part], k[part], v[part])


@pytest.mark.parametrize("empty", [{"b": 0}, {"sq": 0}, {"sk": 0}])
def test_empty_tensors(empty):
    q, k, v = inputs(**empty)
    out, lse = flashsmith.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()


# ---- Streams and graphs -----------------------------------------------------------------------------------------


def test_a_call_is_ordered_on_the_current_stream():
    """Case 44: a slow fill precedes it there, and nothing else orders the two."""
    sources = inputs()
    expected = flashsmith.attention(*sources)
    side = torch.cuda.Stream()
    tensors = tuple(torch.zeros_like(x) for x in sources)
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(side):
            for tensor in tensors:
                tensor.zero_()
            torch.cuda._sleep(200_000)
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.copy_(source)
            out = flashsmith.attention(*tensors)
        side.synchronize()
        assert torch.equal(out, expected)


def test_copies_live_long_enough():
    """Case 44: a non-contiguous input is copied, its last reference dropped at once, and its memory taken again."""
    q, k, v = inputs()
    expected = flashsmith.attention(q, k, v)
    for _ in range(50):
        torch.cuda._sleep(100_000)
        out = flashsmith.attention(q, k, torch.cat([v, v[..., :1]], -1)[..., :64])
        junk = [torch.full_like(v, math.nan) for _ in range(4)]
        assert torch.equal(out, expected)
        del junk


@pytest.mark.parametrize("calls_before", [1, 3])
def test_a_warm_call_is_captured_and_replayed(calls_before):
    q, k, v = inputs()
    for _ in range(calls_before):
        flashsmith.attention(q, k, v, causal=True, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashsmith.attention(q, k, v, causal=True, return_lse=True)
    for seed in (7, 8):
        for tensor, new in zip((q, k, v), inputs(seed=seed), strict=True):
            tensor.copy_(new)
        graph.replay()
        expected, expected_lse = flashsmith.attention(q, k, v, causal=True, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    # A misaligned input is copied inside the graph as well.
    shifted = torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashsmith.attention(shifted, k, v, causal=True)
    graph.replay()
    assert torch.equal(out, expected)


def test_a_first_call_inside_a_capture_leaves_the_stream_usable():
    q, k, v = inputs()
    expected = flashsmith.attention(q, k, v)  # compiled, so that only the loading is missing below

    def capture_cold():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            q.mul_(1)  # a graph without work would warn
            flashsmith.attention(q, k, v)

    with use_backend(CudaBackend()):
        with pytest.raises(CaptureError, match="Warm up first"):
            capture_cold()
        torch.cuda.synchronize()
        assert torch.equal(flashsmith.attention(q, k, v), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flashsmith.attention(q, k, v)
        graph.replay()
        assert torch.equal(out, expected)


# ---- Threads, processes, devices --------------------------------------------------------------------------------


def test_cold_threads_call_first_together():
    """Case 46: threads that never used CUDA, one key and several, a backend that has loaded nothing."""
    cases = [(inputs(sq=sq), {"causal": causal}) for sq in (64, 200) for causal in (False, True)] * 2
    expected = [flashsmith.attention(*tensors, **call) for tensors, call in cases]
    torch.cuda.synchronize()
    results, gate = {}, threading.Barrier(len(cases))

    def call(i):
        gate.wait()
        tensors, flags = cases[i]
        results[i] = flashsmith.attention(*tensors, **flags)

    with use_backend(CudaBackend()):
        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(cases))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert all(torch.equal(results[i], expected[i]) for i in range(len(cases)))


def test_forks():
    """Case 47: a child forked before CUDA works, one forked after it gets a clear error, and so does its parent not."""
    code = """
import os, warnings, torch, flashsmith
from flashsmith.generator.errors import LaunchError
warnings.simplefilter("ignore", DeprecationWarning)
def run():
    tensors = [torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    return tensors, flashsmith.attention(*tensors).isfinite().all().item()
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    os._exit(0 if run()[1] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "forked early"
tensors, fine = run()
assert fine
child = os.fork()
if child == 0:
    try:
        flashsmith.attention(*tensors)
    except LaunchError as error:
        os._exit(7 if "forked" in str(error) and "spawn" in str(error) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "forked late"
assert run()[1]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    q, k, v = inputs()
    expected = flashsmith.attention(q, k, v, causal=True)
    elsewhere = [x.to("cuda:1") for x in (q, k, v)]
    with torch.cuda.device(0):
        for _ in range(3):
            out = flashsmith.attention(*elsewhere, causal=True)
            assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
            assert torch.equal(out.to("cuda:0"), expected)
    with pytest.raises(TensorError, match="one device"):
        flashsmith.attention(q, elsewhere[1], elsewhere[2])


# ---- Callers of other kinds -------------------------------------------------------------------------------------


def test_autocast_decides_for_mixed_dtypes():
    """Case 31."""
    q, k, v = (x.float() for x in inputs())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flashsmith.attention(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flashsmith.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    with pytest.raises(TensorError, match="one dtype"):
        flashsmith.attention(q, k, v.bfloat16())
    with pytest.raises(TensorError, match="autocast"):
        flashsmith.attention(q, k, v)


def test_gradients_are_refused():
    q, k, v = inputs()
    with pytest.raises(UnsupportedError, match="forward only"):
        flashsmith.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        flashsmith.attention(q, k, v)


def test_cupy_arrays_give_cupy_arrays():
    """Case 49."""
    cupy = pytest.importorskip("cupy")
    q, k, v = inputs()
    expected, expected_lse = flashsmith.attention(q, k, v, causal=True, return_lse=True)
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    out, lse = flashsmith.attention(*arrays, causal=True, return_lse=True)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert torch.equal(torch.from_dlpack(out), expected) and torch.equal(torch.from_dlpack(lse), expected_lse)
    flipped = flashsmith.attention(arrays[0], arrays[1][:, ::-1], arrays[2][:, ::-1])
    torch.testing.assert_close(torch.from_dlpack(flipped), flashsmith.attention(q, k, v), rtol=0, atol=2e-3)
    integers = cupy.from_dlpack(torch.zeros(1, 8, 1, 8, dtype=torch.int32, device="cuda"))
    with pytest.raises(TensorError, match="bfloat16"):
        flashsmith.attention(integers, integers, integers)


def test_a_captured_tensor_on_the_cpu_is_refused():
    """Case 40."""
    bias = torch.zeros(200)
    with pytest.raises(TensorError, match=r"captured tensor 'bias' must be on cuda:0.*on cpu"):
        flashsmith.attention(*inputs(), score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx])


# ---- Cost -------------------------------------------------------------------------------------------------------


def test_the_host_cost_of_a_repeated_call():
    """A loose bound against accidents; benchmarks/host_cost.py measures it well."""
    q, k, v = inputs(b=1, sq=128, sk=128)
    costs = []
    with torch.no_grad():
        for _ in range(20):
            flashsmith.attention(q, k, v, causal=True)
        for _ in range(7):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(200):
                flashsmith.attention(q, k, v, causal=True)
            costs.append((time.perf_counter() - started) / 200)
    torch.cuda.synchronize()
    assert min(costs) < 30e-6


def test_a_repeated_call_neither_waits_nor_logs(caplog):
    q, k, v = inputs()
    flashsmith.attention(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        with caplog.at_level(logging.DEBUG, logger="flashsmith"):
            torch.cuda._sleep(50_000_000)
            started = time.perf_counter()
            flashsmith.attention(q, k, v)
            assert time.perf_counter() - started < 0.01
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not caplog.records
