"""The registry of kernel families. A new family adds one import and one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..arch import Arch
from ..errors import UnsupportedError, unknown_name_message
from ..spec import AttentionSpec, ProblemShape
from .base import Family
from .forward_sm80 import ForwardSm80
from .forward_sm90 import ForwardSm90

#: By name, best first: `families_for` keeps this order.
FAMILIES: dict[str, Family] = {family.name: family for family in (ForwardSm90(), ForwardSm80())}


def family_named(name: str) -> Family:
    """The family called `name`. Raises UnsupportedError."""
    if name not in FAMILIES:
        raise UnsupportedError(unknown_name_message("kernel family", name, tuple(FAMILIES)))
    return FAMILIES[name]


def families_for(spec: AttentionSpec, arch: Arch) -> tuple[Family, ...]:
    """The families that can do `spec` on `arch`, best first. Raises UnsupportedError if there is none."""
    reasons = []
    found = []
    for family in FAMILIES.values():
        if family.op != spec.op:
            continue
        reason = family.unsupported_reason(spec, arch)
        if reason is None:
            found.append(family)
        else:
            reasons.append(f"{family.name}: {reason}")
    if not found:
        raise UnsupportedError(f"No kernel family does {spec} on {arch}. " + " ".join(reasons))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Choice:
    """The family of a call, and why each better one is passed over: sentences, in the families' order."""

    family: Family
    passed_over: tuple[str, ...] = ()


def choose_family(
    spec: AttentionSpec,
    arch: Arch,
    *,
    name: str = "",
    strides: Mapping[str, tuple[int, ...]] | None = None,
    shape: ProblemShape | None = None,
) -> Choice:
    """The best family that does `spec` on `arch`; the one called `name` where that is given.

    With the `strides` of q, k and v (elements; batch, seqlen, nheads) and the `shape`, the best that reads such
    tensors in place. Raises UnsupportedError where there is none.
    """
    families = families_for(spec, arch)
    if name:
        named = family_named(name)
        if named not in families:
            cannot = named.unsupported_reason(spec, arch) or f"it does op {named.op!r}, not {spec.op!r}."
            raise UnsupportedError(f"The kernel family {name} cannot do {spec} on {arch}: {cannot}")
        families = (named,)
    reasons: list[str] = []
    for family in families:
        reason = None if strides is None or shape is None else family.layout_reason(strides, shape)
        if reason is None:
            return Choice(family, tuple(reasons))
        reasons.append(f"{family.name} cannot read these tensors in place: {reason}")
    raise UnsupportedError(f"No kernel family does {spec} on {arch} with these strides. " + " ".join(reasons))
