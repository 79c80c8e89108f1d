"""Launches through tensor maps: the packed struct, decoded again, and the pair of counters in it."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalCall=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import math
import threading
import timeit
from dataclasses import replace

import pytest
import torch
from helpers_attention import FakeBackend, qkv, randn

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.errors import ConfigError, UnsupportedError
from flashsmith.generator.families import family_named
from flashsmith.generator.families.forward_sm90 import ForwardSm90
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime import tensor_maps
from flashsmith.runtime.launch import MappedPlan, argument_layout, prepare
from flashsmith.runtime.problem import problem_of

FAMILY = family_named("forward_sm90")
SM90 = arch_from_name("sm_90")


def planned(problem, q, k, v, *, backend, **changes):
    shape = ProblemShape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    config = replace(FAMILY.default_config(problem.spec, SM90), **changes)
    plan = prepare(problem, config, family=FAMILY, shape=shape, q=q, k=k, v=v, softmax_scale=0.25, backend=backend)
    assert isinstance(plan, MappedPlan)
    return plan


@pytest.fixture
def allocated(monkeypatch):
    """The sizes of every tensor of zeros that is made."""
    sizes, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *s, **o: sizes.append(s) or zeros(*s, **o))
    return sizes


def test_every_member_of_the_struct():
    q = randn(2, 4, 33, 64).transpose(1, 2)  # heads before rows in memory
    k, v = randn(2, 47, 2, 3, 64)[:, :, :, 0], randn(2, 47, 2, 96)[..., 8:48]
    backend = FakeBackend()
    plan = planned(problem_of(dtype="fp16", head_dim=64, head_dim_v=40), q, k, v, backend=backend)
    plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), 0x1000, 0x2000, (), 5)
    launch = backend.launches[0]
    config, values = launch.config, launch.values
    tiles = math.ceil(33 / config.B_r) * 2 * 4
    assert values.pop("softmax_scale_log2") == pytest.approx(0.25 * math.log2(math.e), rel=1e-6)
    assert 1 <= values.pop("section_heads") <= 8
    assert values == {
        "q": q.data_ptr(),
        "q_sizes": (64, 33, 4, 2),
        "q_box": (64, 64, 1, 1),
        "q_stride_b": 4 * 33 * 64,
        "q_stride_s": 64,
        "q_stride_h": 33 * 64,
        "k": k.data_ptr(),
        "k_sizes": (64, 47, 2, 2),
        "k_box": (64, config.B_c, 1, 1),
        "k_stride_b": 47 * 2 * 3 * 64,
        "k_stride_s": 2 * 3 * 64,
        "k_stride_h": 3 * 64,
        "v": v.data_ptr(),
        "v_sizes": (40, 47, 2, 2),
        "v_box": (64, config.B_c, 1, 1),
        "v_stride_b": 47 * 2 * 96,
        "v_stride_s": 2 * 96,
        "v_stride_h": 96,
        "o": 0x1000,
        "o_sizes": (40, 33, 4, 2),
        "o_box": (64, 64, 1, 1),
        "o_stride_b": 33 * 4 * 40,
        "o_stride_s": 4 * 40,
        "o_stride_h": 40,
        "lse": 0x2000,
        "next_tile": 0,  # a static schedule draws nothing
        "seqlen_q": 33,
        "seqlen_k": 47,
        "nheads": 4,
        "group_size": 2,
        "num_tiles": tiles,
        "num_row_tiles": tiles // 8,
        "num_heads_total": 8,
        "softmax_scale": 0.25,
    }
    assert launch.grid == (min(tiles, 132), 1, 1) and launch.threads == config.threads and launch.stream == 5
    assert launch.smem_bytes == FAMILY.resources(launch.spec, config).smem_bytes


def test_a_packed_plan_maps_groups_of_heads_and_counts_their_rows():
    q, k, v = qkv(b=2, sq=33, sk=47, h=8, hk=2)
    backend = FakeBackend()
    problem = problem_of(dtype="fp16", head_dim=64, causal=True)
    plan = planned(problem, q, k, v, backend=backend, num_warpgroups=2, schedule="static", pack_gqa=True)
    plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), 0x1000, 0x2000, (), 5)
    values = backend.launches[0].values
    assert (values["q_sizes"], values["q_box"]) == ((64, 4, 33, 2, 2), (64, 4, 16, 1, 1))
    assert [values[f"q_stride_{axis}"] for axis in "hskb"] == [64, 8 * 64, 4 * 64, 33 * 8 * 64]
    assert (values["o_sizes"], values["o_box"]) == (values["q_sizes"], values["q_box"])
    assert (values["k_sizes"], values["nheads"], values["group_size"]) == ((64, 47, 2, 2), 8, 4)
    # 33 queries of 4 heads are 132 rows: two tiles of 128 for each of 4 KV heads.
    assert (values["num_row_tiles"], values["num_heads_total"], values["num_tiles"]) == (2, 4, 8)
    assert backend.launches[0].grid == (8, 1, 1)


def test_a_plan_is_refused_where_the_heads_cannot_be_packed():
    problem, backend = problem_of(dtype="fp16", head_dim=64, causal=True), FakeBackend()
    for h, hk in ((4, 4), (6, 2), (128, 1)):
        with pytest.raises(ConfigError, match=rf"nheads_k, must be more than 1 and divide 64, but got {h // hk}\. Use"):
            planned(problem, *qkv(h=h, hk=hk), backend=backend, num_warpgroups=2, pack_gqa=True)
    assert not backend.loads


def test_captured_numbers_and_tensors_reach_their_members():
    q, k, v = qkv()
    slopes = torch.arange(16.0).view(2, 8)[:, ::2]  # strides (8, 2)
    problem = problem_of(dtype="fp16", head_dim=64, window_size=(5, 1), softcap=30.0, alibi_slopes=slopes)
    backend = FakeBackend()
    plan = planned(problem, q, k, v, backend=backend)
    other = slopes.clone()
    plan.launch(16, 32, 48, 64, 0, (other,), 0)
    mods = {n: value for n, value in backend.launches[0].values.items() if n.startswith(("mask_", "score_"))}
    assert mods == {
        "score_slopes": other.data_ptr(),
        "score_slopes_stride_0": 8,
        "score_slopes_stride_1": 2,
        "mask_left": 5,
        "mask_right": 1,
        "score_softcap": 30.0,
        "score_inverse_softcap": pytest.approx(1 / 30, rel=1e-6),
    }


def test_a_repeated_launch_encodes_nothing_and_writes_one_buffer(monkeypatch):
    backend = FakeBackend()
    encoded = []
    encode = backend.encode_tensor_map
    monkeypatch.setattr(backend, "encode_tensor_map", lambda *a: encoded.append(a) or encode(*a))
    plan = planned(problem_of(dtype="fp16", head_dim=64, causal=True), *qkv(), backend=backend)
    for o in (64, 64, 80, 64, 80):
        plan.launch(16, 32, 48, o, o + 4096, (), 0)
    assert [call[0] for call in encoded] == [16, 32, 48, 64, 80]
    assert [(launch.values["o"], launch.values["lse"]) for launch in backend.launches] == [
        (o, o + 4096) for o in (64, 64, 80, 64, 80)
    ]
    assert len(plan._free) == 1


def test_strides_beyond_32_bits():
    wide = torch.empty_strided((2, 2, 2, 64), (1 << 33, 1 << 34, 1 << 35, 1), dtype=torch.float16, device="meta")
    backend = FakeBackend()
    plan = planned(problem_of(dtype="fp16", head_dim=64), wide, wide, wide, backend=backend)
    plan.launch(1, 2, 3, 4, 0, (), 0)
    assert [backend.launches[0].values[f"k_stride_{axis}"] for axis in "bsh"] == [1 << 33, 1 << 34, 1 << 35]


# ---- Counters ----------------------------------------------------------------------------------------------------


def counters_of(backend):
    return [launch.values["next_tile"] for launch in backend.launches]


def test_a_dynamic_schedule_gets_zeroed_counters_per_stream(allocated):
    backend = FakeBackend()
    plan = planned(problem_of(dtype="fp16", head_dim=64, causal=True), *qkv(), backend=backend)
    assert plan.record.config.schedule == "dynamic"
    assert len(allocated) == 1  # made when the plan is, not by a launch
    for stream in (1, 2, 1):
        plan.launch(16, 32, 48, 64, 0, (), stream)
    one, two, again = counters_of(backend)
    assert one == again != two and 0 not in (one, two)
    assert len(allocated) == 1


@pytest.mark.parametrize("schedule", ["static", "grid"])
def test_other_schedules_get_none(allocated, schedule):
    backend = FakeBackend()
    changes = {"schedule": schedule, "q_stages": 1}
    plan = planned(problem_of(dtype="fp16", head_dim=64, causal=True), *qkv(), backend=backend, **changes)
    plan.launch(16, 32, 48, 64, 0, (), 1)
    assert counters_of(backend) == [0] and not allocated


def test_plans_of_one_gpu_share_the_counters_of_a_stream(monkeypatch, allocated):
    """The driver's view of a GPU without one: only the device's name is pretended."""
    shared = tensor_maps.TileCounters(torch.device("cpu"))
    monkeypatch.setattr("flashsmith.runtime.launch.tile_counters", lambda device: shared)
    backend = FakeBackend()
    for rows in (33, 65):
        plan = planned(problem_of(dtype="fp16", head_dim=64, causal=True), *qkv(sq=rows), backend=backend)
        plan.launch(16, 32, 48, 64, 0, (), 7)
    assert len(set(counters_of(backend))) == 1 and len(allocated) == 1


def test_launches_in_a_capture_get_counters_of_their_own_and_allocate_none(allocated):
    backend = FakeBackend()
    problem = problem_of(dtype="fp16", head_dim=64, causal=True)
    plan = planned(problem, *qkv(), backend=backend)
    plan.launch(16, 32, 48, 64, 0, (), 7)
    backend.capturing = True
    for _ in range(2):
        plan.launch(16, 32, 48, 64, 0, (), 7)
    planned(problem, *qkv(sq=20), backend=backend)  # a plan of a loaded kernel may be made inside a capture
    backend.capturing = False
    plan.launch(16, 32, 48, 64, 0, (), 7)
    eager, one, two, again = counters_of(backend)
    assert eager == again and len({eager, one, two}) == 3
    assert len(allocated) == 1


def test_the_default_stream_cannot_be_captured_and_is_not_asked(monkeypatch):
    """Asking while another stream is captured would break that capture."""
    backend, asked = FakeBackend(), []
    monkeypatch.setattr(backend, "is_capturing", lambda: asked.append(1) or False)
    plan = planned(problem_of(dtype="fp16", head_dim=64, causal=True), *qkv(), backend=backend)
    asked.clear()
    plan.launch(16, 32, 48, 64, 0, (), 0)
    assert not asked
    plan.launch(16, 32, 48, 64, 0, (), 7)
    assert asked and 0 not in counters_of(backend)


def test_empty_tensors_load_no_kernel_and_allocate_nothing(allocated):
    backend = FakeBackend(capturing=True)
    plan = planned(problem_of(dtype="fp16", head_dim=64, causal=True), *qkv(sk=0), backend=backend)
    assert plan.is_empty and not backend.loads and not allocated


# ---- Threads, errors, cost ---------------------------------------------------------------------------------------


def test_threads_do_not_write_each_others_arguments():
    backend = FakeBackend()
    plan = planned(problem_of(dtype="fp16", head_dim=64, causal=True), *qkv(), backend=backend)
    inside, go = threading.Event(), threading.Event()
    recorded = plan._launch

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
    assert len(set(counters_of(backend))) == 2


def test_addresses_that_stand_elsewhere_are_refused():
    class Other(ForwardSm90):
        def arguments(self, spec):
            *maps, lse, counters = super().arguments(spec)[:6]
            return (*maps, counters, lse, *super().arguments(spec)[6:])

    with pytest.raises(UnsupportedError, match="must be o, lse, next_tile"):
        argument_layout(Other(), problem_of(dtype="fp16", head_dim=64).spec)


def test_maps_and_counters_cost_little_more_than_addresses():
    """Against accidents, at three times the bound that benchmarks/host_cost.py is held to on an idle machine."""
    costs = {}
    for name in ("forward_sm80", "forward_sm90"):
        problem, tensors, family = problem_of(dtype="fp16", head_dim=64, causal=True), qkv(), family_named(name)
        q, k, v = tensors
        plan = prepare(
            problem, family.default_config(problem.spec, SM90), family=family, shape=ProblemShape(2, 33, 47, 4, 2),
            q=q, k=k, v=v, softmax_scale=0.25, backend=FakeBackend(),
        )  # fmt: skip
        plan._launch = lambda *_: None
        run = lambda plan=plan: plan.launch(16, 32, 48, 64, 0, (), 1)  # noqa: E731
        costs[name] = min(timeit.repeat(run, number=500, repeat=20)) / 500
    assert costs["forward_sm90"] - costs["forward_sm80"] < 2.4e-6
