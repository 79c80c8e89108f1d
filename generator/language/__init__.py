"""Masks and scores in Python: traced once into an expression graph, from which kernels and tile classes follow.

A mask is `mask_mod(b, h, q_idx, kv_idx) -> bool`, a score modification `score_mod(score, b, h, q_idx, kv_idx)`. They
use Python's operators, the functions below, the call's sizes `seqlen_q`, `seqlen_k`, `nheads`, and captured numbers
and tensors (`table[i, j]`).
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
