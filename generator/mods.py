"""The common masks and score modifications, written in the language users write theirs in.

Positions are aligned bottom-right: query row i of seqlen_q stands at key position i + (seqlen_k - seqlen_q).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import SpecError, UsageError
from .language import abs, seqlen_k, seqlen_q, tanh
from .language.ops import SIZE_LIMIT, float_of, number_text

MaskMod = Callable[..., Any]
ScoreMod = Callable[..., Any]

#: Caps c such that c and 1 / c are normal numbers of fp32.
SOFTCAP_MIN = 2.0**-126
SOFTCAP_MAX = 2.0**126


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """True where the key is not after the row's own position, aligned bottom-right."""
    return kv_idx <= q_idx + (seqlen_k - seqlen_q)


def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """True: every row sees every key."""
    return True


def sliding_window(left: int = -1, right: int = -1) -> MaskMod:
    """The mask of keys from `left` before to `right` after the row's position, inclusive; negative is unlimited.

    The values are kernel arguments; only which sides are limited changes the kernel. Raises UsageError.
    """
    for name, value in (("left", left), ("right", right)):
        if not _is_int(value):
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


def prefix_lm(n: Any) -> MaskMod:
    """The causal mask with the first `n` keys visible to every row; `n` an int, or integers of shape (batch,).

    Raises UsageError.
    """
    if _is_int(n):
        return lambda b, h, q_idx, kv_idx: (kv_idx < n) | causal(b, h, q_idx, kv_idx)
    if len(getattr(n, "shape", ())) != 1 or _is_floating(n):
        raise UsageError(
            f"n of a prefix must be an integer or an integer tensor of shape (batch,), but got {_words(n)}."
        )
    return lambda b, h, q_idx, kv_idx: (kv_idx < n[b]) | causal(b, h, q_idx, kv_idx)


def document(ids_q: Any, ids_kv: Any = None) -> MaskMod:
    """The mask of keys in the row's own document; ids are integer tensors of shape (seqlen,) or (batch, seqlen).

    `ids_kv` is `ids_q` where it is not given. Raises UsageError.
    """
    for name, ids in (("ids_q", ids_q), ("ids_kv", ids_q if ids_kv is None else ids_kv)):
        _check_table(name, ids, "(seqlen,) or (batch, seqlen)")
        if _is_floating(ids):
            raise UsageError(f"{name} must hold integers, but its dtype is {ids.dtype}. Convert it to int32.")
    return _same_id(ids_q) if ids_kv is None else _equal_ids(ids_q, ids_kv)


def _same_id(ids_q: Any) -> MaskMod:
    read = _by_item(ids_q)
    return lambda b, h, q_idx, kv_idx: read(ids_q, b, q_idx) == read(ids_q, b, kv_idx)


def _equal_ids(ids_q: Any, ids_kv: Any) -> MaskMod:
    read_q, read_kv = _by_item(ids_q), _by_item(ids_kv)
    return lambda b, h, q_idx, kv_idx: read_q(ids_q, b, q_idx) == read_kv(ids_kv, b, kv_idx)


def alibi(slopes: Any) -> ScoreMod:
    """ALiBi: score - slope * |distance to the row's position|; `slopes` fp32 of shape (nheads,) or (batch, nheads).

    Raises UsageError.
    """
    _check_table("slopes", slopes, "(nheads,) or (batch, nheads)")
    if not _is_floating(slopes):
        raise UsageError(f"slopes must be floating point, but its dtype is {slopes.dtype}. Convert it to float32.")
    slope = _by_item(slopes)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slope(slopes, b, h) * abs(q_idx + (seqlen_k - seqlen_q) - kv_idx)

    return biased


def softcap(cap: float) -> ScoreMod:
    """cap * tanh(score / cap): scores bounded smoothly by `cap` > 0. Raises UsageError."""
    softcap = softcap_value(cap)
    inverse_softcap = 1.0 / softcap  # a product costs less than a division

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return softcap * tanh(score * inverse_softcap)

    return capped


def softcap_value(cap: object) -> float:
    """`cap` as a float. Raises SpecError unless it is a number such that fp32 holds it and 1 / cap as normal numbers.

    Beyond those, the kernel's product score * (1 / cap) would be NaN or 0. NumPy's numbers are numbers too.
    """
    number = float_of(cap)
    if number is not None and SOFTCAP_MIN <= number <= SOFTCAP_MAX:
        return number
    raise SpecError(
        f"softcap must be 0 (none) or a number from {SOFTCAP_MIN:.3g} to {SOFTCAP_MAX:.3g}, such that fp32 holds it and"
        f" its inverse, but got {number_text(cap)}. Usual caps are 10 to 100; pass 0.0 for no cap, and .item() of a"
        " tensor."
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_floating(tensor: Any) -> bool:
    return "float" in str(getattr(tensor, "dtype", ""))


def _words(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{value!r} ({type(value).__name__})" if shape is None else f"shape {tuple(shape)} of {value.dtype}"


def _check_table(name: str, table: Any, shapes: str) -> None:
    if len(getattr(table, "shape", ())) not in (1, 2):
        raise UsageError(f"{name} must be a tensor of shape {shapes}, but got {_words(table)}.")


def _by_item(table: Any) -> Callable[[Any, Any, Any], Any]:
    """How `table` is read at (b, i): its first dimension is the batch where it has two."""
    return (lambda table, b, i: table[i]) if len(table.shape) == 1 else (lambda table, b, i: table[b, i])
