"""The references against attention written out, and graphs against Python."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashsmith.generator import mods
from flashsmith.generator.language import (
    and_masks,
    compose_scores,
    exp,
    log,
    maximum,
    nheads,
    seqlen_k,
    seqlen_q,
    sqrt,
    tanh,
    trace_mask,
    trace_score,
    where,
)
from flashsmith.runtime import reference
from flashsmith.runtime.reference import Sizes, attention_16bit, attention_reference, evaluate


def inputs(b=2, sq=5, sk=7, h=4, hk=2, d=16, dv=8, dtype=torch.float16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(b, sq, h, d, generator=g).to(dtype),
        torch.randn(b, sk, hk, d, generator=g).to(dtype),
        torch.randn(b, sk, hk, dv, generator=g).to(dtype),
    )


def by_hand(q, k, v, scale, visible, score):
    """Attention in Python floats, one row at a time."""
    b, sq, h, _ = q.shape
    group = h // k.shape[2]
    out, lse = torch.zeros(b, sq, h, v.shape[3], dtype=torch.float64), torch.zeros(b, h, sq, dtype=torch.float64)
    for bi in range(b):
        for hi in range(h):
            for i in range(sq):
                logits = []
                for j in range(k.shape[1]):
                    dot = sum(x * y for x, y in zip(q[bi, i, hi].tolist(), k[bi, j, hi // group].tolist(), strict=True))
                    logits.append(score(dot * scale, bi, hi, i, j) if visible(bi, hi, i, j) else -math.inf)
                weights = [math.exp(x) for x in logits]
                total = sum(weights)
                lse[bi, hi, i] = math.log(total) if total else -math.inf
                for j, weight in enumerate(weights):
                    if weight:
                        out[bi, i, hi] += weight / total * v[bi, j, hi // group].double()
    return out, lse


def plain(score, b, h, i, j):
    return score


CASES = {
    "full": ({}, lambda b, h, i, j: True, plain),
    "causal": ({"mask": trace_mask(mods.causal)}, lambda b, h, i, j: j <= i + 2, plain),
    "window": (
        {"mask": and_masks(mods.causal, mods.sliding_window(1, -1))},
        lambda b, h, i, j: i + 1 <= j <= i + 2,
        plain,
    ),
    "rows without a key": (
        {"mask": trace_mask(lambda b, h, q_idx, kv_idx: (kv_idx > 2) & (q_idx != 3) & (b == 0))},
        lambda b, h, i, j: j > 2 and i != 3 and b == 0,
        plain,
    ),
    "softcap and alibi": (
        {"score": compose_scores(mods.softcap(0.5), mods.alibi(torch.tensor([0.1, 0.2, 0.3, 0.4])))},
        lambda b, h, i, j: True,
        lambda s, b, h, i, j: 0.5 * math.tanh(s / 0.5) - (0.1 * (h + 1)) * abs(i + 2 - j),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_attention_by_definition(case):
    graphs, visible, score = CASES[case]
    q, k, v = inputs()
    out, lse = attention_reference(q, k, v, softmax_scale=0.3, **graphs)
    expected_out, expected_lse = by_hand(q, k, v, 0.3, visible, score)
    # Captured floats reach the kernel, and so the graph, rounded to fp32.
    torch.testing.assert_close(out, expected_out, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-7)


def test_more_rows_than_keys_leave_the_first_rows_empty():
    q, k, v = inputs(sq=9, sk=3)
    out, lse = attention_reference(q, k, v, mask=trace_mask(mods.causal))
    assert (out[:, :6] == 0).all() and (lse[:, :, :6] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 6:]).all() and (out[:, 6:] != 0).any()


@pytest.mark.parametrize("sizes", [{"sk": 0}, {"sq": 0}, {"b": 0}])
def test_empty_tensors(sizes):
    q, k, v = inputs(**sizes)
    out, lse = attention_reference(q, k, v)
    assert out.shape == (*q.shape[:3], 8) and (out == 0).all()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and (lse == -math.inf).all()


def test_chunks_of_rows_change_nothing(monkeypatch):
    q, k, v = inputs(sq=11)
    whole = attention_reference(q, k, v, mask=trace_mask(mods.causal))
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 2 * 4 * 7 * 3)
    parts = attention_reference(q, k, v, mask=trace_mask(mods.causal))
    torch.testing.assert_close(parts, whole, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_16_bit_reference_is_near_but_not_equal(dtype):
    q, k, v = inputs(sq=33, sk=40, dtype=dtype)
    mask, score = trace_mask(mods.causal), trace_score(mods.softcap(5.0))
    exact, _ = attention_reference(q, k, v, mask=mask, score=score)
    rough = attention_16bit(q, k, v, mask=mask, score=score)
    assert rough.dtype == dtype
    error = (rough.double() - exact).abs().max().item()
    eps = torch.finfo(dtype).eps
    assert eps / 64 < error < 4 * eps


def test_the_16_bit_reference_agrees_with_torch():
    q, k, v = inputs(sq=20, sk=20, hk=4, dtype=torch.bfloat16)
    by_torch = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2).float() for x in (q, k, v)))
    torch.testing.assert_close(attention_16bit(q, k, v).float(), by_torch.transpose(1, 2), rtol=0.02, atol=0.02)


TABLE = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
BIAS = torch.tensor([[0.5, -0.25], [1.5, 2.0]], dtype=torch.bfloat16)
FLAGS = torch.tensor([True, False, True, True])


def arithmetic(s, b, h, q_idx, kv_idx):
    x = (q_idx * 7 - kv_idx * 5) // 3 + (q_idx - kv_idx) % 4 - (kv_idx - q_idx) // (q_idx - 2) % (kv_idx - 3)
    y = ((x & 6) | (kv_idx ^ 5)) + (~q_idx) + (x << 2) + (x >> 1)
    return where(x < y, x, maximum(y, -q_idx)) * 0.5 + s


def functions(s, b, h, q_idx, kv_idx):
    return tanh(s) + exp(-s * s) + log(s * s + 1.0) + sqrt(abs(s)) / (q_idx + 1) + -s


def tables(s, b, h, q_idx, kv_idx):
    return s + BIAS[b, h] * TABLE[(q_idx + kv_idx) % 8]


def sizes(s, b, h, q_idx, kv_idx):
    return s + seqlen_k - seqlen_q * nheads


@pytest.mark.parametrize("function", [arithmetic, functions, tables, sizes], ids=lambda f: f.__name__)
@given(b=st.integers(0, 1), h=st.integers(0, 1), q_idx=st.integers(0, 9), kv_idx=st.integers(0, 9), s=st.floats(-3, 3))
def test_graphs_compute_what_python_computes(function, b, h, q_idx, kv_idx, s):
    traced = trace_score(function)
    leaves = {name: torch.tensor([value]) for name, value in zip(("b", "h", "q_idx", "kv_idx"), (b, h, q_idx, kv_idx))}  # noqa: B905
    leaves["score"] = torch.tensor([s], dtype=torch.float64)
    found = evaluate(traced.graph, leaves, Sizes(10, 11, 2), scalars=traced.scalars, tables=traced.tables)
    assert found.item() == pytest.approx(_python(function, s, b, h, q_idx, kv_idx), rel=1e-6, abs=1e-6)


def _python(function, s, b, h, q_idx, kv_idx):
    if function is tables:
        return s + BIAS[b, h].item() * TABLE[(q_idx + kv_idx) % 8].item()
    if function is sizes:
        return s + 11 - 10 * 2
    if function is functions:
        root = math.sqrt(abs(s)) / (q_idx + 1)
        return math.tanh(s) + math.exp(-s * s) + math.log(s * s + 1.0) + root - s

    def floordiv(a, c):
        return a // c if c else 0

    def mod(a, c):
        return a % c if c else 0

    x = (q_idx * 7 - kv_idx * 5) // 3 + (q_idx - kv_idx) % 4 - mod(floordiv(kv_idx - q_idx, q_idx - 2), kv_idx - 3)
    y = ((x & 6) | (kv_idx ^ 5)) + (~q_idx) + (x << 2) + (x >> 1)
    return (x if x < y else max(y, -q_idx)) * 0.5 + s


def test_a_branch_not_taken_may_index_outside():
    table = torch.arange(4.0)

    def shifted(s, b, h, q_idx, kv_idx):
        return s + where(kv_idx >= 2, table[kv_idx - 2], 0.0) + where(kv_idx < 2, table[kv_idx + 2], 0.0)

    q, k, v = inputs(sq=2, sk=6)
    by_roll, _ = attention_reference(q, k, v, score=trace_score(shifted))
    bias = torch.tensor([2.0, 3.0, 0.0, 1.0, 2.0, 3.0])
    by_bias, _ = attention_reference(q, k, v, score=trace_score(lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx]))
    assert torch.equal(by_roll, by_bias)


def test_a_bool_table_masks():
    mask = trace_mask(lambda b, h, q_idx, kv_idx: FLAGS[kv_idx])
    q, k, v = inputs(sk=4)
    _, lse = attention_reference(q, k, v, mask=mask)
    _, without = attention_reference(q, k[:, [0, 2, 3]], v[:, [0, 2, 3]])
    torch.testing.assert_close(lse, without)
