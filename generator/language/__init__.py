"""Masks and scores in Python: traced once into an expression graph, from which kernels and tile classes follow.

A mask is `mask_mod(b, h, q_idx, kv_idx) -> bool`, a score modification `score_mod(score, b, h, q_idx, kv_idx)`. They
use Python's operators, the functions below, the call's sizes `seqlen_q`, `seqlen_k`, `nheads`, and captured numbers
and tensors (`table[i, j]`).

The rules a mod can rely on:

- Captured numbers and tensors are arguments of the kernel: another value needs no new kernel. Literals, booleans and
  strings are part of the function. Lengths are below 2^29.
- Integers are exact while every intermediate value fits 64 bits; the kernel computes in 32 bits only where it can prove
  that nothing is lost. `//` and `%` round towards minus infinity; a divisor of 0 gives 0.
- A table is read at its nearest element where an index lies outside it. Indices `b`, `h`, `q_idx` and `kv_idx`, and
  constants, are checked against its shape before the launch.
- The function is traced, not run: it must have no effect and no state. A call that is not known to be pure is refused
  before it happens (so are assignments to captured objects), and a TraceError fails the trace even where the function
  catches it. Unseen are: numpy.random (two traces that differ are refused), methods of lists, dicts and sets that a
  call returned, `k.__class__`, `k is x`, isinstance() against other classes than numbers, and under a C profiler
  (cProfile before Python 3.12) every call.
- fp32 arithmetic is the GPU's; an integer operand is converted where the other is fp32.
"""

from __future__ import annotations

from .combine import and_masks, compose_scores, or_masks
from .functions import abs, exp, log, maximum, minimum, sqrt, tanh, where
from .graph import Graph
from .node import Node, ScalarSlot, TableSlot
from .simplify import simplify
from .trace import Traced, trace_mask, trace_score
from .values import Value, nheads, seqlen_k, seqlen_q

__all__ = [
    "Graph",
    "Node",
    "ScalarSlot",
    "TableSlot",
    "Traced",
    "Value",
    "abs",
    "and_masks",
    "compose_scores",
    "exp",
    "log",
    "maximum",
    "minimum",
    "nheads",
    "or_masks",
    "seqlen_k",
    "seqlen_q",
    "simplify",
    "sqrt",
    "tanh",
    "trace_mask",
    "trace_score",
    "where",
]
