"""Torch's own entry points, at a fraction of what the public ones cost; each has a public way to fall back to.

They carry no promise, so those that do more than read a number are tried on CPU tensors before they are trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: `check(q, k, v)`: whether three arguments are tensors like those the check was made for.
TensorCheck = Callable[[Any, Any, Any], bool]
#: `empty(sizes, strides, dtype)`: a tensor on one kind of device, the current one of that kind.
Allocator = Callable[[tuple[int, ...], tuple[int, ...], "torch.dtype"], "torch.Tensor"]


def never_alike(q: object, k: object, v: object) -> bool:
    """The `TensorCheck` that accepts nothing."""
    return False


def tensor_check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> TensorCheck | None:
    """A check that accepts tensors of the classes, dtypes, devices, shapes and strides of these, all in one call.

    It accepts none that requires a gradient, has its negative bit set, is fake, a wrapper or a transform's, nor any in
    another of torch's modes (inference, autocast, transforms). It may refuse tensors that are alike, and does not see
    that memory was freed. None where torch offers no such check, where two of the tensors are one, or one requires a
    gradient.
    """
    guards = _tensor_guards()
    if guards is None or q is k or k is v or q is v or q.requires_grad or k.requires_grad or v.requires_grad:
        return None
    found: TensorCheck = guards(q, k, v, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return found


def allocator(device: torch.device) -> Allocator:
    """How to allocate on `device`, which must be current: a fraction of what `torch.empty` costs."""
    name = {"cuda": "_empty_strided_cuda", "cpu": "_empty_strided_cpu"}.get(device.type)
    found: Allocator | None = getattr(_internal_guards(), name, None) if name and _allocates() else None
    return found or partial(_public_empty, device)


def _public_empty(
    device: torch.device, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    import torch

    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _internal_guards() -> Any:
    import torch

    return getattr(getattr(torch._C, "_dynamo", None), "guards", None)


@lru_cache(maxsize=1)
def _allocates() -> bool:
    """Whether the internal allocation takes what `Allocator` says; it has one signature for all devices."""
    import torch

    try:
        made = _internal_guards()._empty_strided_cpu((2, 3), (4, 1), torch.float16)
        return (tuple(made.shape), made.stride(), made.dtype) == ((2, 3), (4, 1), torch.float16)
    except (AttributeError, TypeError, RuntimeError):
        return False


@lru_cache(maxsize=1)
def _tensor_guards() -> Any:
    """The class behind `tensor_check`, or None if this torch's does not tell apart what a launch depends on."""
    import torch

    try:
        found = _internal_guards().TensorGuards
        with torch.enable_grad():  # some torch counts a gradient only where it is wanted
            return found if _tells_apart(found) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def _tells_apart(guards: Any) -> bool:
    import torch

    one = torch.zeros(1, 2, 3, 8, dtype=torch.float16, device="cpu")
    alike = [one.clone() for _ in range(3)]
    check = guards(*alike, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    others = (
        one[:, :1],
        one[0],
        one.transpose(1, 2).contiguous().transpose(1, 2),
        one.bfloat16(),
        one.to("meta"),
        torch.nn.Parameter(one, requires_grad=False),
        one.clone().requires_grad_(),
        torch._neg_view(one),  # pyright: ignore[reportPrivateImportUsage]
        one.numpy(),
        None,
    )
    told = (not check(*alike[:i], other, *alike[i + 1 :]) for i in range(3) for other in others)
    return check(*(one.clone() for _ in range(3))) is True and all(told)
