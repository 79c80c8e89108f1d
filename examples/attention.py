"""flashsmith.attention next to attention written out, and which kernel it used.

    python examples/attention.py

On a machine without a GPU the same kernel runs in the emulator, on smaller tensors.
"""

from __future__ import annotations

import torch

import flashsmith
from flashsmith.runtime.attention import last_plan
from flashsmith.runtime.emulated import emulated_attention

on_gpu = torch.cuda.is_available()
device, seqlen, nheads = ("cuda", 4096, 16) if on_gpu else ("cpu", 160, 2)
q, k, v = (torch.randn(1, seqlen, nheads, 64, device=device, dtype=torch.bfloat16) for _ in range(3))

attention = flashsmith.attention if on_gpu else emulated_attention
out, lse = attention(q, k, v, causal=True, return_lse=True)

scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / 64**0.5
hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)
scores = scores.masked_fill(hidden, float("-inf"))
expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.float())

print(f"out {tuple(out.shape)} {out.dtype}, lse {tuple(lse.shape)} {lse.dtype}")
print(f"max|out - expected| = {(out.float() - expected).abs().max().item():.1e}")
print(f"max|lse - expected| = {(lse - scores.logsumexp(-1)).abs().max().item():.1e}")
print(f"kernel: {last_plan() or 'in the emulator'}")
