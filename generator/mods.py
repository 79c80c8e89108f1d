"""The common masks and score modifications, written in the language users write theirs in.

Positions are aligned bottom-right: query row i of seqlen_q stands at key position i + (seqlen_k - seqlen_q).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import UsageError
from .language import abs, seqlen_k, seqlen_q, tanh
from .language.ops import SIZE_LIMIT

MaskMod = Callable[..., Any]
ScoreMod = Callable[..., Any]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """True where the key is not after the row's own position, aligned bottom-right."""
    return kv_idx <= q_idx + (seqlen_k - seqlen_q)


def sliding_window(left: int = -1, right: int = -1) -> MaskMod:
    """The mask of keys from `left` before to `right` after the row's position, inclusive; negative is unlimited.

    The values are kernel arguments; only which sides are limited changes the kernel.
    """
    for name, value in (("left", left), ("right", right)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{name} of a sliding window must be an integer, but got {value!r}. -1 is unlimited.")
    # Beyond the largest length a limit changes nothing; clamped, its sums stay in 32 bits.
    left, right = min(left, SIZE_LIMIT), min(right, SIZE_LIMIT)

    def left_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + (seqlen_k - seqlen_q) - left <= kv_idx

    def right_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx + (seqlen_k - seqlen_q) + right

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return left_window(b, h, q_idx, kv_idx) & right_window(b, h, q_idx, kv_idx)

    if left < 0 and right < 0:
        return everything
    return left_window if right < 0 else right_window if left < 0 else window


def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """True: every row sees every key."""
    return True


def prefix_lm(n: Any) -> MaskMod:
    """The causal mask with the first `n` keys visible to every row; `n` an int, or an int tensor of shape (batch,)."""
    if hasattr(n, "shape") and len(n.shape) == 1:
        return lambda b, h, q_idx, kv_idx: (kv_idx < n[b]) | causal(b, h, q_idx, kv_idx)
    return lambda b, h, q_idx, kv_idx: (kv_idx < n) | causal(b, h, q_idx, kv_idx)


def document(ids_q: Any, ids_kv: Any = None) -> MaskMod:
    """The mask of keys in the row's own document; ids are int tensors of shape (seqlen,) or (batch, seqlen).

    `ids_kv` is `ids_q` where it is not given.
    """
    keys = ids_q if ids_kv is None else ids_kv

    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids_q[index_q(b, q_idx)] == keys[index_kv(b, kv_idx)]

    index_q, index_kv = _sequence_index("ids_q", ids_q), _sequence_index("ids_kv", keys)
    return same_document


def alibi(slopes: Any) -> ScoreMod:
    """ALiBi: score - slope * |distance to the row's position|; `slopes` fp32 of shape (nheads,) or (batch, nheads)."""
    _sequence_index("slopes", slopes)

    def per_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * abs(q_idx + (seqlen_k - seqlen_q) - kv_idx)

    def per_batch_and_head(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[b, h] * abs(q_idx + (seqlen_k - seqlen_q) - kv_idx)

    return per_head if len(slopes.shape) == 1 else per_batch_and_head


def softcap(cap: float) -> ScoreMod:
    """cap * tanh(score / cap): scores bounded smoothly by `cap` > 0."""
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < float("inf"):
        raise UsageError(f"softcap must be a positive finite number, but got {cap!r}. Leave it out for no cap.")
    softcap, inverse_softcap = float(cap), 1.0 / float(cap)

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return softcap * tanh(score * inverse_softcap)

    return capped


def _sequence_index(name: str, table: Any) -> Callable[[Any, Any], Any]:
    """How `table` of one or two dimensions is indexed by (b, i)."""
    ndim = len(getattr(table, "shape", ()))
    if ndim not in (1, 2):
        raise UsageError(f"{name} must be a tensor of one or two dimensions, but got {ndim}.")
    return (lambda b, i: i) if ndim == 1 else (lambda b, i: (b, i))
