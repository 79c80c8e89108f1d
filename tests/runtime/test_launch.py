"""Packing: every member of the kernel's struct, decoded again and compared with what it must be."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import math
import struct
import threading

import pytest
import torch
from helpers_attention import FakeBackend, qkv, randn

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.errors import CaptureError
from flashsmith.generator.families import family_named
from flashsmith.generator.families.base import ArgumentField
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.launch import ArgumentBlock, ArgumentLayout, prepare
from flashsmith.runtime.problem import Problem, problem_of

FAMILY = family_named("forward_sm80")


def planned(problem: Problem, q, k, v, *, backend, scale=0.25, captured=None):
    shape = ProblemShape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    config = FAMILY.default_config(problem.spec, arch_from_name("sm_90"))
    return prepare(
        problem,
        config,
        family=FAMILY,
        shape=shape,
        q=q,
        k=k,
        v=v,
        softmax_scale=scale,
        backend=backend,
        captured=captured,
    )


def test_every_member_of_the_struct():
    q = randn(2, 4, 33, 64).transpose(1, 2)  # heads before rows in memory
    k, v = randn(2, 47, 2, 3, 64)[:, :, :, 0], randn(2, 47, 2, 96)[..., 8:40]
    backend = FakeBackend()
    problem = problem_of(dtype="fp16", head_dim=64, head_dim_v=32)
    plan = planned(problem, q, k, v, backend=backend)
    plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), 0x1000, 0x2000, (), 5)
    launch = backend.launches[0]
    B_r = launch.config.B_r
    tiles = math.ceil(33 / B_r)
    assert launch.values.pop("softmax_scale_log2") == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)
    assert launch.values.pop("section_heads") >= 1
    assert launch.values == {
        "q": q.data_ptr(),
        "k": k.data_ptr(),
        "v": v.data_ptr(),
        "o": 0x1000,
        "lse": 0x2000,
        "q_stride_b": 4 * 33 * 64,
        "q_stride_s": 64,
        "q_stride_h": 33 * 64,
        "k_stride_b": 47 * 2 * 3 * 64,
        "k_stride_s": 2 * 3 * 64,
        "k_stride_h": 3 * 64,
        "v_stride_b": 47 * 2 * 96,
        "v_stride_s": 2 * 96,
        "v_stride_h": 96,
        "o_stride_b": 33 * 4 * 32,
        "o_stride_s": 4 * 32,
        "o_stride_h": 32,
        "seqlen_q": 33,
        "seqlen_k": 47,
        "nheads": 4,
        "group_size": 2,
        "num_row_tiles": tiles,
        "num_heads_total": 8,
        "softmax_scale": 0.25,
    }
    assert launch.grid == (tiles * 8, 1, 1)
    assert launch.threads == launch.config.num_warps * 32
    assert launch.smem_bytes == FAMILY.resources(problem.spec, launch.config).smem_bytes
    assert launch.stream == 5


def test_captured_numbers_and_tensors_reach_their_members():
    q, k, v = qkv()
    slopes = torch.arange(16.0).view(2, 8)[:, ::2]  # strides (8, 2)
    ids = torch.zeros(2, 47, 3, dtype=torch.int32)[:, :, 1]
    limit = 7
    problem = problem_of(
        dtype="fp16",
        head_dim=64,
        window_size=(5, 1),
        softcap=30.0,
        alibi_slopes=slopes,
        mask_mod=lambda b, h, q_idx, kv_idx: ids[b, kv_idx] < limit,
    )
    backend = FakeBackend()
    plan = planned(problem, q, k, v, backend=backend)
    other_slopes, other_ids = slopes.clone(), ids.clone()
    assert plan.given_tables[0] is ids and plan.given_tables[1] is slopes
    plan.launch(16, 32, 48, 64, 0, (other_ids, other_slopes), 0)
    values = backend.launches[0].values
    mods = {name: value for name, value in values.items() if name.startswith(("mask_", "score_"))}
    # The addresses are those of the tensors given at the launch, the strides those of the plan.
    assert mods.pop("mask_ids") == other_ids.data_ptr()
    assert mods.pop("score_slopes") == other_slopes.data_ptr()
    assert mods == {
        "mask_ids_stride_0": 141,
        "mask_ids_stride_1": 3,
        "score_slopes_stride_0": 8,
        "score_slopes_stride_1": 2,
        "mask_left": 5,
        "mask_right": 1,
        "mask_limit": 7,
        "score_softcap": 30.0,
        "score_inverse_softcap": pytest.approx(1 / 30, rel=1e-6),
    }


def test_strides_beyond_32_bits():
    base = torch.zeros(64, dtype=torch.float16)
    view = base.as_strided((1, 1, 1, 64), (1 << 33, 1 << 34, 1 << 35, 1))
    wide = torch.empty_strided((2, 2, 2, 64), (1 << 33, 1 << 34, 1 << 35, 1), dtype=torch.float16, device="meta")
    backend = FakeBackend()
    problem = problem_of(dtype="fp16", head_dim=64)
    planned(problem, wide, wide, wide, backend=backend).launch(1, 2, 3, 4, 0, (), 0)
    values = backend.launches[0].values
    assert [values[f"k_stride_{axis}"] for axis in "bsh"] == [1 << 33, 1 << 34, 1 << 35]
    # A dimension of size 1 is never stepped along.
    planned(problem, view, view, view, backend=backend).launch(1, 2, 3, 4, 0, (), 0)
    assert [backend.launches[1].values[f"k_stride_{axis}"] for axis in "bsh"] == [0, 0, 0]


def test_more_heads_than_a_second_grid_dimension_holds():
    wide = torch.zeros(8, dtype=torch.float16).as_strided((70_000, 1, 3, 8), (0, 0, 0, 1))
    backend = FakeBackend()
    plan = planned(problem_of(dtype="fp16", head_dim=8), wide, wide, wide, backend=backend)
    plan.launch(16, 16, 16, 16, 0, (), 0)
    assert backend.launches[0].grid == (210_000, 1, 1)
    assert backend.launches[0].values["num_heads_total"] == 210_000


@pytest.mark.parametrize("empty", [{"b": 0}, {"sq": 0}, {"sk": 0}, {"h": 0}])
def test_empty_tensors_load_no_kernel(empty):
    backend = FakeBackend(capturing=True)  # nor would they be refused inside a capture
    plan = planned(problem_of(dtype="fp16", head_dim=64), *qkv(**empty), backend=backend)
    assert plan.is_empty and not backend.loads


def test_an_unloaded_kernel_is_refused_inside_a_capture():
    backend = FakeBackend(capturing=True)
    problem = problem_of(dtype="fp16", head_dim=64)
    with pytest.raises(CaptureError, match="Warm up first"):
        planned(problem, *qkv(), backend=backend)
    assert not backend.loads
    backend.capturing = False
    planned(problem, *qkv(), backend=backend)
    backend.capturing = True
    planned(problem, *qkv(sq=5), backend=backend)  # another shape of a loaded kernel
    assert len(backend.loads) == 1


def test_threads_do_not_write_each_others_arguments():
    backend = FakeBackend()
    problem = problem_of(dtype="fp16", head_dim=64)
    plan = planned(problem, *qkv(), backend=backend)
    inside, go = threading.Event(), threading.Event()
    kernel = next(iter(backend.loaded.values()))
    recorded = kernel.launch

    def slow_launch(grid, threads, smem_bytes, stream, packed):
        if stream == 1:
            inside.set()
            assert go.wait(10)
        recorded(grid, threads, smem_bytes, stream, packed)

    plan._launch = slow_launch
    first = threading.Thread(target=plan.launch, args=(16, 16, 16, 16, 0, (), 1))
    first.start()
    assert inside.wait(10)
    plan.launch(32, 32, 32, 32, 0, (), 2)
    go.set()
    first.join()
    assert {launch.stream: launch.values["q"] for launch in backend.launches} == {1: 16, 2: 32}


def test_launches_in_a_row_share_one_buffer():
    backend = FakeBackend()
    plan = planned(problem_of(dtype="fp16", head_dim=64), *qkv(), backend=backend)
    buffers = []
    plan._launch = lambda *args: buffers.append(args[-1])
    for _ in range(3):
        plan.launch(16, 16, 16, 16, 0, (), 0)
    assert len({id(buffer) for buffer in buffers}) == 1 and len(plan._free) == 1


def test_a_failed_launch_leaves_the_plan_usable():
    backend = FakeBackend()
    plan = planned(problem_of(dtype="fp16", head_dim=64), *qkv(), backend=backend)
    good = plan._launch

    def fail(*_):
        raise RuntimeError("no")

    plan._launch = fail
    with pytest.raises(RuntimeError):
        plan.launch(16, 16, 16, 16, 0, (), 0)
    plan._launch = good
    plan.launch(32, 32, 32, 32, 0, (), 0)
    assert backend.launches[0].values["q"] == 32


def test_a_missing_value_is_an_error_not_a_zero():
    fields = (ArgumentField("long long", "a", ""), ArgumentField("int", "b", ""))
    with pytest.raises(KeyError, match="b"):
        ArgumentBlock(ArgumentLayout(fields), {"a": 1})
    block = ArgumentBlock(ArgumentLayout(fields), {"a": 1, "b": 2})
    assert block.offsets == {"a": 0, "b": 8} and block.image == struct.pack("=qi4x", 1, 2)


def test_the_record_prints_what_was_used():
    backend = FakeBackend()
    plan = planned(problem_of(dtype="fp16", head_dim=64, causal=True), *qkv(), backend=backend)
    assert str(plan.record).startswith("forward_sm80 B_r=")
    assert "(given) for forward fp16 d64 mask[kv_idx <= " in str(plan.record)
    assert str(plan.record).endswith("on sm_90")
