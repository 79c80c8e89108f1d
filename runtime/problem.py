"""A call's keyword arguments as a problem: the `AttentionSpec`, and the run-time values its mask and score read."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..generator import mods
from ..generator.errors import SpecError, TraceError
from ..generator.language import Traced, and_masks, compose_scores, trace_mask, trace_score
from ..generator.language.node import const, leaf
from ..generator.language.ops import float_of, number_text
from ..generator.spec import AttentionSpec

if TYPE_CHECKING:
    import torch

#: A mask function of `(b, h, q_idx, kv_idx)`, or what tracing one gave.
MaskMod = Callable[..., Any] | Traced
#: A score function of `(score, b, h, q_idx, kv_idx)`, or what tracing one gave.
ScoreMod = Callable[..., Any] | Traced
Window = Sequence[int | None]

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Problem:
    """A spec with the values of its slots. `mask` and `score` are None where the spec's graph is."""

    spec: AttentionSpec
    mask: Traced | None = None
    score: Traced | None = None

    @property
    def tables(self) -> tuple[Any, ...]:
        """The captured tensors, the mask's slots first, then the score's."""
        return (*(self.mask.tables if self.mask else ()), *(self.score.tables if self.score else ()))


def problem_of(
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
) -> Problem:
    """The problem of one call of `attention`.

    Masks are and-ed: causal, window, `mask_mod`. After the scale, scores apply in the order softcap, ALiBi,
    `score_mod`. `causal` and `window_size=(-1, 0)` are one problem, as are a mask that hides nothing and none at all,
    and a score function that gives its score back and none. Raises SpecError, and TraceError for the functions.
    """
    left, right = window_of(window_size)
    masks: list[Traced] = []
    if check_flag("causal", causal) or right == 0:
        masks.append(trace_mask(mods.causal))
        right = -1
    if left >= 0 or right >= 0:
        masks.append(trace_mask(mods.sliding_window(left, right)))
    if mask_mod is not None:
        masks.append(_traced(mask_mod, "mask"))
    scores: list[Traced] = []
    if check_softcap(softcap):
        scores.append(trace_score(mods.softcap(softcap)))
    if alibi_slopes is not None:
        scores.append(trace_score(mods.alibi(alibi_slopes)))
    if score_mod is not None:
        scores.append(_traced(score_mod, "score"))
    mask = None if not masks else masks[0] if len(masks) == 1 else and_masks(*masks)
    if mask is not None and mask.graph.root is const(True):
        mask = None
    score = None if not scores else scores[0] if len(scores) == 1 else compose_scores(*scores)
    if score is not None and score.graph.root is leaf("score"):
        score = None
    spec = AttentionSpec(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask=None if mask is None else mask.graph,
        score=None if score is None else score.graph,
    )
    return Problem(spec, mask, score)


def window_of(window_size: Window) -> tuple[int, int]:
    """(left, right) as integers, -1 for unlimited. None and every negative number mean unlimited; 0 means 0.

    Raises SpecError unless `window_size` is a pair of integers or None.
    """
    try:
        sides = tuple(window_size)
    except TypeError:
        sides = ()
    if len(sides) != 2:
        raise SpecError(
            f"window_size must be a pair (left, right) of integers or None, but got {window_size!r}."
            " Use (-1, -1) for no window."
        )
    left, right = (_window_side(side, window_size) for side in sides)
    return left, right


def _window_side(side: Any, window_size: Window) -> int:
    if side is None:
        return -1
    try:
        value = side.__index__()  # NumPy's and torch's integers too
    except (AttributeError, TypeError):
        value = None
    if value is None or isinstance(side, bool):
        raise SpecError(
            f"Each side of window_size must be an integer or None, but got {window_size!r}."
            " -1 or None is unlimited, 0 is the key at the row's own position alone."
        )
    return -1 if value < 0 else min(int(value), _INT_MAX)


def check_softcap(softcap: float) -> bool:
    """Whether a softcap is asked for; 0 and None ask for none. Raises SpecError as `mods.softcap_value` does."""
    if softcap is None or float_of(softcap) == 0.0:
        return False
    mods.softcap_value(softcap)
    return True


def check_flag(name: str, value: object) -> bool:
    """`value` as a bool. One bool of NumPy or torch, 0 and 1 are taken too; raises SpecError for anything else."""
    if isinstance(value, bool):
        return value
    is_bool = str(getattr(value, "dtype", "")).endswith("bool") and getattr(value, "shape", None) == ()
    if is_bool or isinstance(value, numbers.Integral):
        number = int(cast(int, value))
        if number in (0, 1):
            return bool(number)
    raise SpecError(
        f"{name} must be True or False, but got {number_text(value)} ({type(value).__name__}). Pass one of the two."
    )


def _traced(function: MaskMod | ScoreMod, kind: str) -> Traced:
    if isinstance(function, Traced):
        if function.graph.kind != kind:
            raise TraceError(
                f"{kind}_mod must be a {kind} function, but got a traced {function.graph.kind} function."
                " Swap mask_mod and score_mod."
            )
        return function
    return trace_mask(function) if kind == "mask" else trace_score(function)
