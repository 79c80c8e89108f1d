"""The Hopper forward on a Hopper GPU: every kind of problem, layout, stream and graph. 24 kernels, small ones."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import logging
import math
import threading

import pytest
import torch
from helpers_attention import Device, assert_right, qkv

import flashsmith
from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import family_named
from flashsmith.generator.families.forward_sm90 import ForwardSm90Config
from flashsmith.runtime import preparation
from flashsmith.runtime.attention import last_plan, reset
from flashsmith.runtime.problem import problem_of
from flashsmith.runtime.store import Resolution
from flashsmith.runtime.tensor_maps import tile_counters
from flashsmith.runtime.verify import verify_config

pytestmark = pytest.mark.gpu
GPU = Device("cuda")
FAMILY = family_named("forward_sm90")


@pytest.fixture(autouse=True)
def on_hopper():
    """Skips elsewhere; afterwards every counter that a launch drew tiles from is 0 again."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    yield
    torch.cuda.synchronize()
    counters = tile_counters(torch.device("cuda", torch.cuda.current_device()))
    assert not any(bool(pairs.any()) for pairs in (*counters._reserves, *counters._captured))


@pytest.fixture
def drawing(monkeypatch):
    """Calls use the default configs, whatever was tuned: under a mask their blocks draw tiles."""

    def default(spec, arch, device_name, shape, family, **ways):
        config = family.default_config(spec, arch)
        assert config.schedule == "dynamic"
        return Resolution(config, "default")

    monkeypatch.setattr(preparation, "choose_config", default)
    reset()
    yield
    reset()


def inputs(**sizes):
    return qkv(device="cuda", **{"b": 2, "sq": 200, "sk": 200, "h": 4, "hk": 2, "dtype": torch.bfloat16, **sizes})


def check(q, k, v, *, family="forward_sm90", **call):
    """(out, lse) of a call, right by the one tolerance rule, computed by `family`, equal to the bit when repeated."""
    out, lse = GPU.check(q, k, v, **call)
    record = last_plan()
    assert record.family == family, record
    again, lse_again = flashsmith.attention(q, k, v, return_lse=True, **call)
    assert torch.equal(again, out) and torch.equal(lse_again, lse)
    return out, lse


# ---- Problems ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d", "dv", "dtype", "call"),
    [
        (64, 64, torch.bfloat16, {}),
        (64, 64, torch.bfloat16, {"causal": True}),
        (64, 64, torch.float16, {"causal": True}),
        (72, 40, torch.bfloat16, {"causal": True}),
        (80, 80, torch.bfloat16, {}),
        (96, 96, torch.bfloat16, {"causal": True}),
        (128, 128, torch.float16, {}),
        (128, 128, torch.bfloat16, {"causal": True}),
        (192, 192, torch.bfloat16, {}),
        (192, 128, torch.bfloat16, {"causal": True}),
        (256, 256, torch.bfloat16, {}),
        (256, 256, torch.bfloat16, {"causal": True}),
        (128, 128, torch.bfloat16, {"window_size": (100, 20)}),
        (64, 64, torch.bfloat16, {"window_size": (65, -1), "causal": True}),
        (64, 64, torch.bfloat16, {"softcap": 2.0}),
    ],
    ids=str,
)
def test_dtypes_head_dims_and_masks_at_lengths_off_the_tile(d, dv, dtype, call):
    """Ragged, one row, more rows than keys, more tiles than SMs; GQA 1, 2 and 4."""
    for b, sq, sk, h, hk in (
        (2, 200, 200, 4, 2),
        (3, 1, 515, 4, 1),
        (1, 333, 77, 2, 2),
        (2, 1025, 1100, 8, 2),
        (40, 129, 63, 8, 8),
    ):
        check(*inputs(b=b, sq=sq, sk=sk, h=h, hk=hk, d=d, dv=dv, dtype=dtype), **call)


@pytest.mark.parametrize("d", [64, 128])
def test_a_mask_that_only_the_elements_tell(d):
    q, k, v = inputs(d=d, sq=400, sk=500)
    check(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx) % 3 == 0) & (kv_idx <= q_idx + 100))


def test_a_mask_over_a_table_skips_tiles():
    q, k, v = inputs(b=2, sq=700, sk=700)
    ids = (torch.arange(700, device="cuda", dtype=torch.int32) // 150).expand(2, 700).contiguous()
    check(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx])


def test_alibi_by_batch_and_head():
    q, k, v = inputs(d=128, sq=300, sk=420)
    slopes = torch.linspace(0.01, 0.5, 8, device="cuda").view(2, 4)
    check(q, k, v, causal=True, alibi_slopes=slopes)


def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity():
    """Whole tiles of such rows (bottom-right causal), and some rows of a tile."""
    q, k, v = inputs(sq=700, sk=200)
    out, lse = check(q, k, v, causal=True)
    assert bool((out[:, :500] == 0).all()) and bool((lse[:, :, :500] == -math.inf).all())
    assert bool(lse[:, :, 500:].isfinite().all())


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("scale", [16.0, 64.0, 1e-3])
def test_scores_that_grow_from_tile_to_tile(d, scale):
    """The optimistic softmax keeps an old maximum until a tile would overflow: every tile here makes it redo."""
    q, k, v = inputs(d=d, sq=300, sk=1500)
    ramp = torch.linspace(0.1, 1.0, 1500, device="cuda", dtype=torch.float32)[:, None, None]
    for rising in (ramp, ramp.flip(0)):
        check((q * scale).to(q.dtype), (k * rising).to(k.dtype), v, causal=True)


def test_stale_rows_beyond_the_tensors_are_not_read():
    """Boxes of the copy engine reach beyond the last row: there are zeros, not what lies behind."""
    q, k, v = (torch.cat([x, torch.full_like(x[:, :77], math.nan)], 1)[:, :200] for x in inputs())
    check(q, k, v)
    check(q, k, v, causal=True)


@pytest.mark.parametrize(
    ("d", "values"),
    [
        (64, (4, 64, 2, 2, "optimistic", True, "dynamic", "registers", False)),
        (64, (1, 176, 3, 1, "exact", False, "grid", "registers", False)),
        (128, (3, 80, 2, 2, "exact", True, "static", "registers", False)),
        (64, (2, 128, 2, 2, "optimistic", True, "dynamic", "registers", True)),
        (128, (1, 128, 3, 1, "optimistic", False, "static", "registers", True)),
        (256, (2, 64, 2, 1, "exact", False, "dynamic", "registers", True)),
        (64, (3, 176, 2, 2, "optimistic", True, "dynamic", "shared", False)),
        (64, (4, 96, 3, 1, "exact", False, "static", "shared", False)),
        (128, (3, 128, 2, 1, "wary", True, "static", "shared", False)),
        (80, (2, 80, 2, 1, "optimistic", False, "grid", "shared", False)),
    ],
)
def test_configs_far_from_the_default(d, values):
    problem = problem_of(dtype="bf16", head_dim=d, causal=True)
    verdict = verify_config(problem, ForwardSm90Config(*values), ARCHS["sm_90"], device="cuda", family=FAMILY)
    assert verdict.ok, str(verdict)


# ---- Layouts -----------------------------------------------------------------------------------------------------


def test_strides_of_every_kind_change_no_bit():
    q, k, v = inputs()
    expected, _ = check(q, k, v, causal=True)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(check(*heads_first, causal=True)[0], expected)
    packed = torch.stack([k, v], 2)
    assert torch.equal(check(q, packed[:, :, 0], packed[:, :, 1], causal=True)[0], expected)
    batch_last = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in (q, k, v)]
    assert torch.equal(check(*batch_last, causal=True)[0], expected)
    wide = [torch.cat([x, x], -1)[..., :64] for x in (q, k, v)]
    assert torch.equal(check(*wide, causal=True)[0], expected)


def test_an_expanded_tensor_falls_back_and_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(preparation, "_said", set())
    q, k, v = inputs(hk=1)
    shared = k.expand(2, 200, 4, 64), v.expand(2, 200, 4, 64)
    with caplog.at_level(logging.WARNING, logger="flashsmith.preparation"):
        check(q, *shared, family="forward_sm80")
        check(q[:, :100], *shared, family="forward_sm80")
    assert len(caplog.records) == 1
    check(q, k, v)  # one head of K and V for all, dense: no fallback


def test_a_misaligned_tensor_is_copied():
    q, k, v = inputs()
    expected = flashsmith.attention(q, k, v)
    shifted = torch.cat([k.flatten()[:1], k.flatten()])[1:].view(k.shape)
    assert torch.equal(flashsmith.attention(q, shifted, v), expected)
    assert last_plan().family == "forward_sm90"


# ---- Streams, threads and graphs ---------------------------------------------------------------------------------


def test_two_streams_draw_their_tiles_apart(drawing):
    """Launches overlap: with shared counters each would skip what the other took."""
    sets = [inputs(b=4, sq=1024, sk=1024, h=8, hk=8, seed=seed) for seed in range(2)]
    expected = [flashsmith.attention(*tensors, causal=True) for tensors in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, tensors in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append([flashsmith.attention(*tensors, causal=True) for _ in range(4)])
        torch.cuda.synchronize()
        for outs, right in zip(found, expected, strict=True):
            assert all(torch.equal(out, right) for out in outs)


def test_threads_with_streams_of_their_own(drawing):
    sets = [inputs(b=2, sq=600, sk=600, seed=seed) for seed in range(6)]
    expected = [flashsmith.attention(*tensors, causal=True) for tensors in sets]
    torch.cuda.synchronize()
    right = {}

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [flashsmith.attention(*sets[i], causal=True) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
            right[i] = all(torch.equal(out, expected[i]) for out in outs)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == dict.fromkeys(range(len(sets)), True)


def test_a_thread_that_never_used_cuda_repeats_a_call():
    """Its outputs come from torch's cache, at addresses whose tensor maps are still to be made."""
    q, k, v = inputs()
    expected = flashsmith.attention(q, k, v)
    for _ in range(3):  # a repeated call
        assert torch.equal(flashsmith.attention(q, k, v), expected)
    unused = [torch.empty_like(expected) for _ in range(8)]
    torch.cuda.synchronize()
    del unused
    found = []
    thread = threading.Thread(target=lambda: found.extend([flashsmith.attention(q, k, v) for _ in range(4)]))
    thread.start()
    thread.join()
    assert len(found) == 4 and all(torch.equal(out, expected) for out in found)


def test_two_graphs_run_at_once_and_beside_eager_calls(drawing):
    """Both were captured on one stream, so a pair of counters per stream would be shared by their replays."""
    sets = [inputs(b=4, sq=1024, sk=1024, h=8, hk=8, seed=seed) for seed in range(3)]
    expected = [flashsmith.attention(*tensors, causal=True, return_lse=True) for tensors in sets]
    capture_stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    graphs, outs = [], []
    for tensors in sets[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture_stream):
            outs.append([flashsmith.attention(*tensors, causal=True, return_lse=True) for _ in range(3)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = flashsmith.attention(*sets[2], causal=True, return_lse=True)
        torch.cuda.synchronize()
        for made, (out, lse) in zip(([*outs[0]], [*outs[1]], [eager]), expected, strict=True):
            assert all(torch.equal(one, out) and torch.equal(other, lse) for one, other in made)


def test_a_graph_reads_what_its_tensors_hold_at_each_replay(drawing):
    q, k, v = inputs(d=128)
    flashsmith.attention(q, k, v, causal=True, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashsmith.attention(q, k, v, causal=True, return_lse=True)
    for seed in (7, 8):
        for tensor, new in zip((q, k, v), inputs(d=128, seed=seed), strict=True):
            tensor.copy_(new)
        graph.replay()
        assert_right(out, lse, q, k, v, causal=True)


def test_a_repeated_call_allocates_the_output_and_the_lse_alone(drawing):
    """The counters of the dynamic schedule were allocated by the first call on this GPU."""
    q, k, v = inputs(b=4, sq=2048, sk=2048, h=8, hk=8)
    flashsmith.attention(q, k, v, causal=True, return_lse=True)
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):  # a new stream takes a pair of the reserve
        with torch.cuda.stream(stream):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = flashsmith.attention(q, k, v, causal=True, return_lse=True)
            assert torch.cuda.max_memory_allocated() - before == q.numel() * 2 + 4 * 8 * 2048 * 4
            stream.synchronize()
            del result
