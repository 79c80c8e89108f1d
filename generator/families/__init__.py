"""The registry of kernel families. A new family adds one import and one entry."""

from __future__ import annotations

from ..arch import Arch
from ..errors import UnsupportedError, unknown_name_message
from ..spec import AttentionSpec
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
