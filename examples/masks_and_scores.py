"""Masks and scores are plain Python: traced once, compiled into the kernel, no mask tensor anywhere.

python examples/masks_and_scores.py
"""

from __future__ import annotations

import torch

import flashsmith
from flashsmith.generator.language import maximum, seqlen_k, seqlen_q
from flashsmith.runtime.emulated import emulated_attention

on_gpu = torch.cuda.is_available()
attention = flashsmith.attention if on_gpu else emulated_attention
device, seqlen, nheads = ("cuda", 2048, 8) if on_gpu else ("cpu", 96, 2)
q, k, v = (torch.randn(2, seqlen, nheads, 64, device=device, dtype=torch.float16) for _ in range(3))

# Three documents packed into one sequence: a row sees the keys of its own document, up to its own position.
document = torch.arange(seqlen, device=device) * 3 // seqlen


def causal_documents(b, h, q_idx, kv_idx):
    return (document[q_idx] == document[kv_idx]) & (kv_idx <= q_idx)


# A learned bias for each head and distance, and a floor under every score.
bias = torch.randn(nheads, seqlen, device=device) * 0.1
floor = -20.0


def distance_bias(score, b, h, q_idx, kv_idx):
    position = q_idx + (seqlen_k - seqlen_q)
    return maximum(score + bias[h, maximum(position - kv_idx, 0)], floor)


out = attention(q, k, v, mask_mod=causal_documents, score_mod=distance_bias)

# `floor` is an argument of the kernel: a new value needs no new kernel. Neither does a tensor changed in place.
floor = -10.0
bias.zero_()
changed = attention(q, k, v, mask_mod=causal_documents, score_mod=distance_bias)

print(f"out {tuple(out.shape)}, changed by at most {(out - changed).abs().max().item():.2f}")

# The first document's rows do not know that the others exist.
first = int((document == 0).sum())
alone = attention(q[:, :first], k[:, :first], v[:, :first], causal=True, score_mod=distance_bias)
print(f"first document alone: off by {(changed[:, :first] - alone).abs().max().item():.1e}")
