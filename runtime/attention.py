"""`flashsmith.attention`: the public function, and the path a call takes.

A call that repeats (same shapes, strides, dtypes, device, flags and captured values) is one check of its tensors, two
allocations at most and one launch. Where the flags were last used with other tensors, it is found by all of these in
`_plans`. Everything else, other checks included, happens once per such class, in `_first_call`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch

from ..generator.errors import LaunchError, TensorError
from . import preparation
from .captures import read_captures
from .device import Backend, CudaBackend
from .launch import Plan, PlanRecord
from .preparation import prepare_call, remember
from .problem import MaskMod, ScoreMod, Window, check_flag, window_of
from .tensors import (
    Inputs,
    check_alibi_slopes,
    check_inputs,
    check_no_gradient,
    is_cupy,
    readable,
    torch_from_cupy,
)
from .torch_internals import never_alike, tensor_check

__all__ = ["attention", "explain", "last_plan", "reset"]

#: Plans kept: one per class of calls, the oldest dropped first.
MAX_PLANS = 4096

_plans: dict[Any, Plan] = {}
#: The plan that each set of flags was last used with. Its `check` tells whether the tensors are alike, too.
_recent: dict[Any, Plan] = {}
#: Another object after each `reset`.
_epoch = object()
_last = threading.local()
_backend: Backend = CudaBackend()

_empty, _is_grad_enabled, _float32 = torch.empty, torch.is_grad_enabled, torch.float32
#: Torch's own entry points cost 0.1 us, the public ones about 1 us; a torch without them gets the backend's.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or _backend.current_stream
_current_device = getattr(torch._C, "_cuda_getDevice", None) or _backend.current_device


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    mask_mod: MaskMod | None = ..., score_mod: ScoreMod | None = ..., return_lse: Literal[False] = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: torch.Tensor | None = ..., softmax_scale: float | None = ...,
    mask_mod: MaskMod | None = ..., score_mod: ScoreMod | None = ..., return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Any, k: Any, v: Any, *, causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    alibi_slopes: Any = ..., softmax_scale: float | None = ..., mask_mod: MaskMod | None = ...,
    score_mod: ScoreMod | None = ..., return_lse: bool = ...,
) -> Any: ...  # fmt: skip
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(score(q k^T * softmax_scale), masked) v per batch and head: (batch, seqlen_q, nheads, head_dim_v).

    `q` is (batch, seqlen_q, nheads, head_dim), `k` (batch, seqlen_k, nheads_k, head_dim), `v` (batch, seqlen_k,
    nheads_k, head_dim_v): fp16 or bf16 tensors on one GPU, nheads a multiple of nheads_k, head dims multiples of 8 up
    to 256, any strides with a dense last dimension (others are copied). CuPy arrays give CuPy arrays.

    - `causal`: row i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned).
    - `window_size` (left, right): keys from i + seqlen_k - seqlen_q - left to ... + right, inclusive; None or a
      negative number is unlimited.
    - `softcap` c > 0: scores become c * tanh(score / c). `alibi_slopes`, fp32 (nheads,) or (batch, nheads): minus
      slope * |i + seqlen_k - seqlen_q - j|. `softmax_scale`: 1/sqrt(head_dim) by default.
    - `mask_mod(b, h, q_idx, kv_idx)` tells what is visible, `score_mod(score, b, h, q_idx, kv_idx)` changes the score;
      both are Python functions, traced once. Masks are and-ed; scores apply in the order scale, softcap, ALiBi,
      score_mod.
    - `return_lse`: also the log-sum-exp of each row's scores, (batch, nheads, seqlen_q), fp32, natural logarithm, scale
      included. A row that sees no key gives 0 and -inf.

    Runs on torch's current stream of the tensors' device. Raises TensorError, SpecError and TraceError for what the
    caller can mend, UnsupportedError where an input wants a gradient, CaptureError where a first call falls into a CUDA
    graph's capture, CompileError and LaunchError.
    """
    tables: tuple[Any, ...] = ()
    captured: object = None
    wants_grad = False
    if alibi_slopes is not None or mask_mod is not None or score_mod is not None:
        captures = read_captures(alibi_slopes, mask_mod, score_mod)
        if captures is not None:
            captured, tables, wants_grad = captures.key, captures.tensors, captures.wants_grad
        else:
            captured = object()  # equal to no key: such a function is traced at each call
    flags: Any = (causal, window_size, softcap, softmax_scale, captured)
    q_address = k_address = v_address = 0
    try:
        plan = _recent.get(flags)
        if plan is None or not plan.check(q, k, v):
            plan = _remembered(q, k, v, flags)
        if plan is not None:
            q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except (AttributeError, TypeError, RuntimeError):  # no torch tensor, a window given as a list, no storage
        plan = flags = None
    if plan is not None and q_address and k_address and v_address and not (
        (q_address | k_address | v_address) & 15
        or (wants_grad and _is_grad_enabled())
        or _current_device() != plan.device_index
    ):  # fmt: skip
        out = plan.empty(plan.out_shape, plan.out_strides, plan.dtype)
        _last.record = plan.record
        stream = _current_stream(plan.device_index)
        if not return_lse:
            plan.launch(q_address, k_address, v_address, out.data_ptr(), 0, tables, stream)
            return out
        lse = plan.empty(plan.lse_shape, plan.lse_strides, _float32)
        plan.launch(q_address, k_address, v_address, out.data_ptr(), lse.data_ptr(), tables, stream)
        return out, lse
    call = {
        "causal": causal, "window_size": window_size, "softcap": softcap, "alibi_slopes": alibi_slopes,
        "softmax_scale": softmax_scale, "mask_mod": mask_mod, "score_mod": score_mod,
    }  # fmt: skip
    return _first_call(q, k, v, call, return_lse, flags)


def last_plan() -> PlanRecord | None:
    """What the latest call of `attention` in this thread used: family, config and its source; None before one."""
    return getattr(_last, "record", None)


def explain(q: Any, k: Any, v: Any, **call: Any) -> PlanRecord:
    """What `attention(q, k, v, **call)` would use, without running it; compiles and loads the kernel. Same errors."""
    call.pop("return_lse", None)
    q, k, v, call = _plain(q, k, v, call) or (q, k, v, call)
    inputs = _checked(q, k, v, call)
    q, k, v = readable("q", q), readable("k", k), readable("v", v)
    with _backend.device_guard(inputs.device_index):
        return prepare_call(q, k, v, call, inputs, _backend)[0].record


def reset() -> None:
    """Forgets every plan, so that the next call looks its config up again (after tuning in this process)."""
    _forget_plans()
    preparation.forget()


def _forget_plans() -> None:
    global _epoch
    _epoch = object()  # before the others: see `_remembered`
    _plans.clear()
    _recent.clear()


def _key(q: Any, k: Any, v: Any, flags: Any) -> Any:
    """All that tells one class of calls from another."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, q.__class__, k.__class__, v.__class__, flags,
    )  # fmt: skip


def _remembered(q: Any, k: Any, v: Any, flags: Any) -> Plan | None:
    """The plan of calls like this one, which is then the recent one of these flags; None: it takes `_first_call`."""
    epoch = _epoch
    plan = _plans.get(_key(q, k, v, flags))
    if plan is None or plan.is_empty or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return None if _is_grad_enabled() else plan
    # A check made in another mode of torch (inference, autocast) may refuse tensors that are alike.
    if plan.check is never_alike or _recent.get(flags) is plan:
        plan.check = tensor_check(q, k, v) or plan.check
    if flags in _recent:
        _recent[flags] = plan
    else:
        remember(_recent, flags, plan, MAX_PLANS)
    if epoch is not _epoch:  # `reset` came in between, and may have been through with `_recent`
        _recent.pop(flags, None)
    return plan


def _first_call(q: Any, k: Any, v: Any, call: dict[str, Any], return_lse: bool, flags: Any) -> Any:
    """A call whose class is new, or whose tensors need more than a launch: gradients, copies, another device.

    `flags` None: not remembered.
    """
    if is_cupy(q) or is_cupy(k) or is_cupy(v):
        q, k, v = (torch_from_cupy(n, x) if is_cupy(x) else x for n, x in (("q", q), ("k", k), ("v", v)))
        return _to_cupy(attention(q, k, v, **call, return_lse=return_lse))
    plain = _plain(q, k, v, call)
    if plain is not None:
        q, k, v, call = plain
        return attention(q, k, v, **call, return_lse=return_lse)
    inputs = _checked(q, k, v, call)
    plain_q, plain_k, plain_v = readable("q", q), readable("k", k), readable("v", v)
    if plain_q is not q or plain_k is not k or plain_v is not v:
        return attention(plain_q, plain_k, plain_v, **call, return_lse=return_lse)
    key = None if flags is None else _key(q, k, v, flags)
    with _backend.device_guard(inputs.device_index):
        plan = _plans.get(key)
        if plan is None:
            plan, captures = prepare_call(q, k, v, call, inputs, _backend)
            if captures is not None and key is not None:
                remember(_plans, key, plan, MAX_PLANS)
        else:
            captures = read_captures(call["alibi_slopes"], call["mask_mod"], call["score_mod"])
        _last.record = plan.record
        tables = captures.tensors if captures is not None else plan.given_tables
        return _run(plan, q, k, v, tables, return_lse, _current_stream(inputs.device_index))


def _run(plan: Plan, q: Any, k: Any, v: Any, tables: tuple[Any, ...], return_lse: bool, stream: int) -> Any:
    out = _empty(plan.out_shape, dtype=plan.dtype, device=plan.device)
    lse = _empty(plan.lse_shape, dtype=_float32, device=plan.device) if return_lse else None
    if plan.is_empty:
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
    else:
        lse_address = 0 if lse is None else lse.data_ptr()
        plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address, tables, stream)
    return out if lse is None else (out, lse)


def _plain(q: Any, k: Any, v: Any, call: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]] | None:
    """The call with flags as plain numbers and tensors cast where autocast asks for it; None where nothing changes."""
    new = dict(call)
    window, causal = call.get("window_size", (-1, -1)), call.get("causal", False)
    if type(window) is not tuple or any(type(side) is not int for side in window):
        new["window_size"] = window_of(window)
    if type(causal) is not bool:
        new["causal"] = check_flag("causal", causal)
    if is_cupy(call.get("alibi_slopes")):
        new["alibi_slopes"] = torch_from_cupy("alibi_slopes", call["alibi_slopes"])
    changed = any(new[name] is not call[name] for name in call)
    if _autocast_applies(q, k, v):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
        changed = True
    return (q, k, v, new) if changed else None


def _autocast_applies(q: Any, k: Any, v: Any) -> bool:
    """Whether torch.autocast is on for floats of several dtypes, or fp32; 16-bit inputs stay as they are."""
    if not all(isinstance(x, torch.Tensor) and x.is_cuda and x.is_floating_point() for x in (q, k, v)):
        return False
    dtypes = {q.dtype, k.dtype, v.dtype}
    return (len(dtypes) > 1 or torch.float32 in dtypes) and torch.is_autocast_enabled("cuda")


def _checked(q: Any, k: Any, v: Any, call: dict[str, Any]) -> Inputs:
    """The facts of a call that can run on a GPU. Raises TensorError, SpecError, UnsupportedError, LaunchError."""
    inputs = check_inputs(q, k, v)
    if inputs.device_type != "cuda" and isinstance(_backend, CudaBackend):
        raise TensorError(
            f"flashsmith.attention runs on GPU tensors, but q, k and v are on {q.device}. Move them with .cuda(), or"
            " run the same kernel on the CPU: `flashsmith emulate`, or from Python"
            " flashsmith.runtime.emulated.emulated_attention(q, k, v, ...)."
        )
    if call.get("alibi_slopes") is not None:
        check_alibi_slopes(call["alibi_slopes"], inputs, q.device)
    captures = read_captures(*(call.get(name) for name in ("alibi_slopes", "mask_mod", "score_mod")))
    check_no_gradient(q, k, v, *(() if captures is None else captures.tensors))
    if inputs.device_type == "cuda" and torch.cuda._is_in_bad_fork():
        raise LaunchError(
            "This process was forked from one that had already used CUDA, and a GPU cannot be used after that."
            ' Start it with multiprocessing\'s "spawn" method, or fork before the first use of the GPU.'
        )
    return inputs


def _to_cupy(result: Any) -> Any:
    import cupy

    if isinstance(result, tuple):
        return tuple(_to_cupy(tensor) for tensor in result)
    if result.dtype == torch.bfloat16:
        raise TensorError("CuPy has no bfloat16. Pass torch tensors for bf16, or float16 arrays.")
    return cupy.from_dlpack(result)


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Within the block, calls of `attention` in this process run on `backend`: a test's stand-in for a GPU."""
    global _backend, _current_stream, _current_device
    saved = _backend, _current_stream, _current_device
    reset()
    _backend, _current_stream, _current_device = backend, backend.current_stream, backend.current_device
    try:
        yield
    finally:
        _backend, _current_stream, _current_device = saved
        reset()


@contextmanager
def only_family(name: str) -> Iterator[None]:
    """Within the block, calls in this process use the kernel family called `name`. Raises UnsupportedError."""
    reset()
    with preparation.only_family(name):
        try:
            yield
        finally:
            reset()


if hasattr(os, "register_at_fork"):
    # A child forked after CUDA was used must not launch from an old plan: its first call is checked again.
    os.register_at_fork(after_in_child=_forget_plans)
