"""What a call's tensors must be: shapes, dtypes, device and strides, checked once per shape class.

Layout is (batch, seqlen, nheads, head_dim) throughout. Nothing here runs when a call repeats.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..generator.errors import SpecError, TensorError, TensorTypeError, UnsupportedError
from ..generator.language.cuda import check_storage
from ..generator.language.ops import SIZE_LIMIT, float_of, number_text
from ..generator.spec import HEAD_DIM_STEP, MAX_HEAD_DIM, ProblemShape

if TYPE_CHECKING:
    import torch

log = logging.getLogger("flashsmith.tensors")

#: Bytes of one cp.async: base addresses and row pitches are multiples of it.
ALIGNMENT = 16
#: ... which is this many 16-bit elements.
STRIDE_STEP = 8
#: The number of heads of a whole batch is a C++ `int` in the kernels.
INT_MAX = 2**31 - 1

_DIMS = {
    "q": "(batch, seqlen_q, nheads, head_dim)",
    "k": "(batch, seqlen_k, nheads_k, head_dim)",
    "v": "(batch, seqlen_k, nheads_k, head_dim_v)",
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The facts of one call's q, k and v: spec-style dtype, sizes, head dims and where they live."""

    dtype: str
    shape: ProblemShape
    head_dim: int
    head_dim_v: int
    device_type: str
    device_index: int


def dtype_name(dtype: torch.dtype) -> str | None:
    """ "fp16" or "bf16", as `AttentionSpec` spells it; None for any other dtype."""
    import torch

    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that `AttentionSpec` calls `name`."""
    import torch

    return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}[name]


def is_cupy(array: object) -> bool:
    """True for a CuPy array, without importing CuPy."""
    return type(array).__module__.partition(".")[0] == "cupy" and hasattr(array, "__dlpack__")


def torch_from_cupy(name: str, array: Any) -> torch.Tensor:
    """A torch view of a CuPy array, ordered behind CuPy's current stream (DLPack); a copy for negative strides.

    Raises TensorError for dtypes that DLPack or the kernels do not take.
    """
    from torch.utils.dlpack import from_dlpack

    if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4):
        raise TensorError(
            f"A CuPy {name} must be float16, but got {array.dtype}."
            " CuPy has no bfloat16 of its own: pass torch tensors for bf16, or array.astype('float16')."
        )
    # DLPack and torch know no negative strides: the array is read forwards, and turned by torch.
    backwards = [axis for axis, stride in enumerate(array.strides) if stride < 0]
    if backwards:
        _log_copy(name, f"its strides are negative: {tuple(array.strides)} bytes")
        array = array[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)]
    tensor: torch.Tensor = from_dlpack(array)
    return tensor.flip(backwards) if backwards else tensor


def check_inputs(q: object, k: object, v: object) -> Inputs:
    """The facts of three tensors that fit together. Raises TensorError or SpecError with the shapes and the remedy."""
    import torch

    named = {"q": q, "k": k, "v": v}
    for name, tensor in named.items():
        _check_is_tensor(name, tensor)
    assert isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    _check_same_device(q, k, v)
    dtype = _check_dtypes(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise TensorError(
                f"{name} must have 4 dimensions {_DIMS[name]}, but got shape {tuple(tensor.shape)}."
                " Add the missing ones with unsqueeze, or view the tensor as four."
            )
    shape = _check_sizes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    return Inputs(
        dtype=dtype,
        shape=shape,
        head_dim=int(q.shape[3]),
        head_dim_v=int(v.shape[3]),
        device_type=q.device.type,
        device_index=q.device.index or 0,
    )


def _check_is_tensor(name: str, tensor: object) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TensorTypeError(
            f"{name} must be a torch tensor or a CuPy array on a GPU, but got {type(tensor).__module__}."
            f"{type(tensor).__qualname__}. Convert it first: torch.as_tensor({name}, device='cuda')."
        )
    if tensor.layout != torch.strided:
        raise TensorError(f"{name} must be a dense tensor, but got layout {tensor.layout}. Call .to_dense() first.")
    if not _has_data(tensor):
        kind = f"{type(tensor).__name__} on {tensor.device}"
        raise TensorError(
            f"{name} must be a plain tensor with data of its own, but got a {kind}. Call flashsmith.attention outside"
            " of torch.func transforms, with the tensor that the wrapper holds."
        )


def _has_data(tensor: torch.Tensor) -> bool:
    """False for meta and fake tensors, wrapper subclasses (DTensor, ...), and tensors of vmap and grad."""
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":  # its data_ptr() warns
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _check_same_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.device == k.device == v.device:
        raise TensorError(
            f"q, k and v must be on one device, but got q on {q.device}, k on {k.device}, v on {v.device}."
            " Move them with .to(q.device)."
        )


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    name = dtype_name(q.dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise TensorError(
            f"q, k and v must have one dtype, but got q {q.dtype}, k {k.dtype}, v {v.dtype}."
            " Convert them with .to(q.dtype), or call under torch.autocast('cuda')."
        )
    if name is None:
        raise TensorError(
            f"q, k and v must be torch.float16 or torch.bfloat16, but got {q.dtype}."
            " Convert them with .to(torch.bfloat16), or call under torch.autocast('cuda')."
        )
    return name


def _check_sizes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> ProblemShape:
    shapes = f"q {q}, k {k}, v {v}"
    for what, index, remedy in (
        ("batch size", 0, "Expand the smaller one."),
        ("length (dimension 1)", 1, "Cut or pad both to one length."),
        ("number of heads (dimension 2)", 2, "Repeat or drop heads of one of them."),
    ):
        if k[index] != v[index]:
            raise TensorError(f"k and v must have the same {what}, but got {shapes}. {remedy}")
    if q[0] != k[0]:
        raise TensorError(f"q, k and v must have the same batch size, but got {shapes}. Expand the smaller one.")
    if q[3] != k[3]:
        raise TensorError(f"q and k must have the same head_dim (last dimension), but got {shapes}.")
    for name, value in (("head_dim", q[3]), ("head_dim_v", v[3])):
        if not 0 < value <= MAX_HEAD_DIM or value % HEAD_DIM_STEP:
            raise SpecError(
                f"{name} must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}, but got {value}"
                f" ({shapes}). Zero-pad the last dimension with torch.nn.functional.pad and cut the output."
            )
    if k[2] == 0:
        raise SpecError(
            f"k and v must have at least one head (dimension 2), but got {shapes}. Pass nheads_k >= 1 heads."
        )
    if q[2] % k[2]:
        raise SpecError(
            f"nheads of q must be a multiple of nheads of k and v, but got {q[2]} and {k[2]} ({shapes})."
            " Repeat or drop heads so that the ratio is an integer."
        )
    shape = ProblemShape(batch=q[0], seqlen_q=q[1], seqlen_k=k[1], nheads=q[2], nheads_k=k[2])
    check_limits(shape, shapes)
    return shape


def check_limits(shape: ProblemShape, words: str = "") -> None:
    """Raises UnsupportedError for a call that is larger than any kernel takes; `words` describe it, else `shape`."""
    if max(shape.seqlen_q, shape.seqlen_k) >= SIZE_LIMIT or shape.batch * shape.nheads > INT_MAX:
        raise UnsupportedError(
            f"Lengths must be below {SIZE_LIMIT} and batch * nheads at most {INT_MAX}, but got {words or shape}."
            " Split the call."
        )


def check_alibi_slopes(slopes: object, inputs: Inputs, device: torch.device) -> None:
    """Raises TensorError unless `slopes` is fp32 of shape (nheads) or (batch, nheads) on `device`."""
    import torch

    nheads, batch = inputs.shape.nheads, inputs.shape.batch
    if not isinstance(slopes, torch.Tensor):
        raise TensorTypeError(
            f"alibi_slopes must be a float32 tensor of shape ({nheads},) or ({batch}, {nheads}), but got"
            f" {type(slopes).__name__}. Convert it: torch.as_tensor(slopes, dtype=torch.float32, device=q.device)."
        )
    if (
        slopes.dtype != torch.float32
        or slopes.device != device
        or tuple(slopes.shape)
        not in (
            (nheads,),
            (batch, nheads),
        )
    ):
        raise TensorError(
            f"alibi_slopes must be float32 of shape ({nheads},) or ({batch}, {nheads}) on {device}, but got"
            f" {slopes.dtype} of shape {tuple(slopes.shape)} on {slopes.device}."
            " Use slopes.to(device=q.device, dtype=torch.float32) and one slope a query head."
        )
    check_storage("alibi_slopes", slopes)


def check_no_gradient(*tensors: Any) -> None:
    """Raises UnsupportedError where one of `tensors` requires a gradient, under torch's grad mode."""
    import torch

    if any(getattr(tensor, "requires_grad", False) for tensor in tensors) and torch.is_grad_enabled():
        raise UnsupportedError(
            "An input requires a gradient, and this version computes the forward only."
            " Call it under torch.no_grad(), or pass q.detach(), k.detach(), v.detach()."
        )


def check_softmax_scale(scale: object, head_dim: int) -> float:
    """The scale as a float; 1/sqrt(head_dim) for None. Raises SpecError unless it is a positive, finite fp32 number."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = float_of(scale)
    if number is None:
        raise SpecError(
            f"softmax_scale must be a number or None, but got {type(scale).__name__} {number_text(scale)}."
            " Call .item() on a tensor (it waits for the GPU), or scale q instead."
        )
    if not 1e-37 < number < 1e37:  # false for NaN, too
        raise SpecError(
            f"softmax_scale must be a finite number above 0 that fp32 can hold, but got {number_text(scale)}."
            " Negate q for a negative scale; leave it out for 1/sqrt(head_dim)."
        )
    return number


def copy_reason(sizes: Sequence[int], strides: Sequence[int], address: int) -> str | None:
    """Why a kernel cannot read a 16-bit tensor in place, or None: dense last dim, pitches of 16 bytes, aligned base.

    The stride of a dimension of size 1 (and every stride of an empty tensor) is never used, so it never matters.
    """
    if 0 in sizes:
        return None
    if strides[-1] != 1 and sizes[-1] > 1:
        return f"its last dimension has stride {strides[-1]}, not 1"
    odd = [s for n, s in zip(sizes[:-1], strides[:-1], strict=True) if n > 1 and s % STRIDE_STEP]
    if odd:
        return f"its strides {tuple(strides)} are not multiples of {STRIDE_STEP} elements"
    if address % ALIGNMENT:
        return f"its address is not a multiple of {ALIGNMENT} bytes"
    return None


def readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where a kernel can read it in place, else a contiguous copy (logged once per reason)."""
    import torch

    reason = copy_reason(tensor.shape, tensor.stride(), tensor.data_ptr())
    if reason is None and not tensor.is_neg():
        return tensor
    _log_copy(name, reason or "its negative bit is set")
    return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)


def launch_strides(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """The element strides of (batch, seqlen, heads) for the kernel; 0 for a dimension that is never stepped along."""
    batch, seqlen, heads = (s if n > 1 else 0 for n, s in zip(sizes[:3], strides[:3], strict=True))
    return batch, seqlen, heads


_logged_copies: set[tuple[str, str]] = set()


def _log_copy(name: str, reason: str) -> None:
    if (name, reason) in _logged_copies or len(_logged_copies) > 256:
        return
    _logged_copies.add((name, reason))
    log.warning(
        "%s is copied before each such call: %s. Make it contiguous where it is created to save the copy.", name, reason
    )
