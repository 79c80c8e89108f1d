"""Kinds of numerical faults that users of attention libraries have reported, on the GPU and in the emulator."""
# pyright: reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import Device

INF, NAN = math.inf, math.nan


@pytest.fixture(
    params=[
        pytest.param(("emulator", "sm_80"), id="emulator"),
        pytest.param(("emulator", "sm_90"), id="emulator-hopper"),
        pytest.param(("cuda",), id="cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    return Device(*request.param)


def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity(device):
    """Case 1."""
    q, k, v = device.qkv(b=1, sq=256, sk=3, h=1, hk=1, d=32)
    out, lse = device.check(q, k, v, causal=True)
    assert (out[:, :253] == 0).all() and (lse[..., :253] == -INF).all() and torch.isfinite(lse[..., 253:]).all()


def only_last_mask(b, h, q_idx, kv_idx):
    return kv_idx == 256


@pytest.mark.parametrize(
    "call", [{"mask_mod": only_last_mask}, {"window_size": (0, -1), "causal": True}], ids=["mask", "window"]
)
def test_tiles_without_a_key_before_the_first_visible_one(device, call):
    """Case 2: the row's maximum is still -inf when its first key comes."""
    q, k, v = device.qkv(b=1, sq=1, sk=257, h=2, hk=1, d=32)
    out, lse = device.check(q, k, v, **call)
    assert torch.equal(out, v[:, 256:].expand_as(out))
    logit = (q[0, 0].double() @ k[0, 256, 0].double()) / 32**0.5
    torch.testing.assert_close(lse[0, :, 0].double(), logit, rtol=1e-5, atol=1e-5)


def test_two_halves_merge_through_their_lse(device):
    """Case 7: natural logarithm, scale included, (batch, nheads, seqlen_q)."""
    q, k, v = device.qkv(sq=9, sk=80, d=32)
    parts = [device.attention(q, k[:, cut], v[:, cut], return_lse=True) for cut in (slice(0, 35), slice(35, 80))]
    whole, whole_lse = device.attention(q, k, v, return_lse=True)
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().transpose(2, 3)[..., None]
    merged = sum(w * out.float() for w, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, whole.float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [1, 2, 63, 65, 127, 129, 238])
def test_lengths_off_the_tile(device, seqlen, causal):
    """Case 8."""
    heads = 1 if device.name == "emulator" else 3
    device.check(*device.qkv(b=1, sq=seqlen, sk=seqlen, h=heads, hk=1, dtype=torch.bfloat16), causal=causal)


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (0, -1), (8, 0), (-3, 0), (3, 2), (-1, 4), (0, 70_000)])
@pytest.mark.parametrize("sizes", [(8, 8), (5, 2), (2, 5)])
def test_window_edges(device, window, sizes):
    """Case 10: inclusive on both sides, aligned bottom-right, 0 is a limit and a negative number is none."""
    sq, sk = sizes
    device.check(*device.qkv(b=1, sq=sq, sk=sk, h=1, hk=1, d=32), window_size=window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi_counts_from_the_rows_own_position(device, causal, per_batch):
    """Case 11."""
    slopes = torch.rand((2, 6) if per_batch else (6,), device=device.tensors)
    device.check(*device.qkv(sq=3, sk=11, h=6, hk=6, d=32), causal=causal, alibi_slopes=slopes)


def test_a_nan_key_that_is_hidden_changes_no_bit(device):
    """Case 13."""
    q, k, v = device.qkv(b=1, sq=40, sk=40, h=1, hk=1, d=32)
    k[:, 30] = 0
    clean = device.attention(q, k, v, causal=True)
    k[:, 30] = NAN
    dirty = device.attention(q, k, v, causal=True)
    assert torch.equal(dirty[:, :30], clean[:, :30])
    assert dirty[:, 30:].isnan().all()


def test_a_nan_value_reaches_only_rows_whose_tiles_hold_it(device):
    """Case 13: it may spread within a partly visible tile, as in torch's math path, and no further."""
    sq = 1024 if device.name == "cuda" else 640
    q, k, v = device.qkv(b=1, sq=sq, sk=sq, h=2, hk=2, d=32)
    clean = device.attention(q, k, v, causal=True)
    v[:, sq - 8, 0] = NAN
    dirty = device.attention(q, k, v, causal=True)
    assert torch.equal(dirty[:, :, 1], clean[:, :, 1])
    far = sq - 8 - 128 - 256  # the largest tiles
    assert torch.equal(dirty[:, :far], clean[:, :far])
    assert dirty[:, sq - 8 :, 0].isnan().all()


def test_stale_rows_beyond_the_keys_are_not_read(device):
    """K and V are the front of a larger cache whose rest is NaN and infinity."""
    q, k, v = device.qkv(b=2, sq=20, sk=45, d=32)
    expected = device.attention(q, k, v)
    caches = []
    for tensor, filler in ((k, NAN), (v, INF)):
        cache = torch.full((2, 200, *tensor.shape[2:]), filler, dtype=tensor.dtype, device=tensor.device)
        cache[:, :45] = tensor
        caches.append(cache[:, :45])
    assert torch.equal(device.attention(q, *caches), expected)


def layouts(x):
    """The same values in every layout a caller may have."""
    b, s, h, d = x.shape
    yield "heads first", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "sequence first", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "packed with others", torch.stack([x, x, x], 2)[:, :, 1]
    yield "wider rows", torch.cat([x, x[..., :8]], -1)[..., :d]
    yield "inner stride 2", torch.stack([x, x], -1).flatten(-2)[..., ::2]
    yield "odd pitch", torch.cat([x, x[..., :1]], -1)[..., :d]
    for offset in (1, 2, 3):
        yield f"offset {offset}", torch.cat([x.flatten()[:offset], x.flatten()])[offset:].view(b, s, h, d)
    yield "negative bit", torch._neg_view(-x)
    yield "conjugate", torch.complex(x.float(), -x.float()).conj().imag.to(x.dtype)


def test_layouts_of_one_input_change_nothing(device):
    """Cases 23 and 25: inputs stay as they were, results too."""
    q, k, v = device.qkv(b=2, sq=20, sk=25, d=32)
    expected = device.attention(q, k, v)
    for position in range(3) if device.name == "cuda" else (2,):
        for name, view in layouts((q, k, v)[position]):
            arguments = [q, k, v]
            arguments[position] = view
            before = view.clone()
            assert torch.equal(device.attention(*arguments), expected), name
            assert torch.equal(view, before), name


def test_expanded_heads(device):
    """Case 23: stride 0 over heads."""
    q, k, v = device.qkv(b=2, sq=20, sk=25, h=4, hk=1, d=32)
    expected = device.attention(q, k, v)
    out, _ = device.check(q, k.expand(2, 25, 4, 32), v.expand(2, 25, 4, 32))
    # Hopper's copy engine takes no stride 0: another family of kernels, with other last bits, reads such tensors.
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)


def test_mods_read_no_table_beyond_its_end(device):
    """Case 38: lengths off the tile, tables exactly as long as the sequence."""
    sk = 2046 if device.name == "cuda" else 78
    q, k, v = device.qkv(b=1, sq=sk, sk=sk, h=2, hk=2, d=32)
    ids = torch.arange(sk, device=device.tensors, dtype=torch.int32) // 40
    bias = torch.randn(2 * sk - 1, device=device.tensors)
    device.check(
        q,
        k,
        v,
        mask_mod=lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
        score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + (sk - 1)],
    )


def test_values_captured_later_are_followed(device):
    """Case 40."""
    q, k, v = device.qkv(b=1, sq=20, sk=20, h=1, hk=1, d=32)
    w, bias = 3, torch.zeros(20, device=device.tensors)

    def mask(b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < w

    def score(s, b, h, q_idx, kv_idx):
        return s + bias[kv_idx]

    results = [device.check(q, k, v, mask_mod=mask, score_mod=score)[0]]
    w = 5
    results.append(device.check(q, k, v, mask_mod=mask, score_mod=score)[0])
    bias[3] = 4.0
    results.append(device.check(q, k, v, mask_mod=mask, score_mod=score)[0])
    bias = bias.half()
    results.append(device.check(q, k, v, mask_mod=mask, score_mod=score)[0])
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])
    assert torch.equal(results[2], results[3])


@pytest.mark.parametrize(
    ("dtype", "d", "dv", "call"),
    [
        (torch.float16, 8, 8, {}),
        (torch.bfloat16, 40, 72, {"window_size": (20, 10)}),
        (torch.float16, 96, 96, {"causal": True, "softcap": 3.0, "softmax_scale": 0.3}),
        (torch.bfloat16, 128, 128, {"causal": True}),
        (torch.bfloat16, 192, 128, {"causal": True, "window_size": (30, -1)}),
        (torch.float16, 256, 256, {"softcap": 50.0}),
    ],
    ids=lambda x: str(x).replace("torch.", "") if not isinstance(x, dict) else "-".join(x) or "plain",
)
def test_dtypes_head_dims_and_flags(device, dtype, d, dv, call):
    shapes = [(2, 70, 90, 2, 1)]
    if device.name == "cuda":
        shapes = [(2, 113, 203, 6, 2), (1, 512, 256, 4, 4), (3, 1, 799, 8, 1), (1, 1023, 1024, 2, 2)]
    for b, sq, sk, h, hk in shapes:
        device.check(*device.qkv(b=b, sq=sq, sk=sk, h=h, hk=hk, d=d, dv=dv, dtype=dtype), **call)


def test_large_and_tiny_scores(device):
    """Scores of thousands: the softmax is one-hot, nothing overflows; all equal: the mean."""
    q, k, v = device.qkv(b=1, sq=33, sk=65, h=1, hk=1, d=32)
    out, _ = device.check(q * 30, k * 30, v)
    assert torch.isfinite(out).all()
    out, lse = device.check(torch.zeros_like(q), k, v)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(65)))
