"""From a call's keyword arguments and checked tensors to a `Plan`: trace, resolve the config, compile, load.

Everything here happens once per class of calls; what can be shared between classes (traced functions, resolved
configs) is kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..generator.errors import TensorError
from ..generator.families import choose_family, family_named
from ..generator.families.base import Family
from ..generator.language.cuda import check_tables
from ..generator.spec import AttentionSpec, ProblemShape
from .captures import Captures, read_captures
from .device import Backend
from .launch import Plan, prepare
from .problem import Problem, problem_of
from .store import Resolution
from .store_choice import choose_config, rounded_shape
from .tensors import Inputs, check_softmax_scale, is_cupy

log = logging.getLogger("flashsmith.preparation")

#: Problems (traced masks and scores) and resolved configs kept, the oldest dropped first.
MAX_KEPT = 1024
MAX_SAID = 256

_problems: dict[Any, Problem] = {}
_resolutions: dict[Any, Resolution] = {}
#: Reasons why a call fell back to another family, each logged once.
_said: set[str] = set()
#: The family that calls must use, "" for the best; see `only_family`.
_only_family = ""
_lock = threading.Lock()


def remember(cache: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    """Puts `value` into `cache`, which keeps at most `limit` entries, the oldest dropped first. Any thread."""
    with _lock:
        while len(cache) >= limit and key not in cache:
            del cache[next(iter(cache))]
        cache[key] = value


def forget() -> None:
    """Drops every traced problem and resolved config."""
    with _lock:
        _problems.clear()
        _resolutions.clear()


def prepare_call(
    q: Any, k: Any, v: Any, call: dict[str, Any], inputs: Inputs, backend: Backend
) -> tuple[Plan, Captures | None]:
    """The plan of a call on checked tensors, and what its functions captured (None: unknown, trace again each time)."""
    alibi_slopes, mask_mod, score_mod = (call.get(name) for name in ("alibi_slopes", "mask_mod", "score_mod"))
    scale = check_softmax_scale(call.get("softmax_scale"), inputs.head_dim)
    captures = read_captures(alibi_slopes, mask_mod, score_mod)
    if captures is None:
        problem = problem_of_call(call, inputs)
    else:
        key = (inputs.dtype, inputs.head_dim, inputs.head_dim_v, call.get("causal"), call.get("window_size"),
               call.get("softcap"), captures.key)  # fmt: skip
        problem = _problems.get(key) or problem_of_call(call, inputs)
        # A problem with tables holds tensors: a later call with equal captures has others.
        if not problem.tables:
            remember(_problems, key, problem, MAX_KEPT)
    _check_tables(problem, inputs.shape, q.device)
    family = _family(problem.spec, q, k, v, inputs, backend)
    resolution = _resolve(problem.spec, family, inputs.shape, inputs.device_index, backend)
    plan = prepare(
        problem,
        resolution.config,
        family=family,
        shape=inputs.shape,
        q=q,
        k=k,
        v=v,
        softmax_scale=scale,
        backend=backend,
        captured=None if captures is None else captures.tensors,
        source=resolution.source,
        bucket="" if resolution.record is None else str(resolution.record.bucket),
        note=resolution.note,
    )
    return plan, captures


def problem_of_call(call: Mapping[str, Any], inputs: Inputs) -> Problem:
    """The problem of `attention`'s keyword arguments. Raises SpecError and TraceError."""
    flags = {name: value for name, value in call.items() if name != "softmax_scale"}
    return problem_of(dtype=inputs.dtype, head_dim=inputs.head_dim, head_dim_v=inputs.head_dim_v, **flags)


def _check_tables(problem: Problem, shape: ProblemShape, device: torch.device) -> None:
    """Raises TensorError where a captured tensor is on another device, or smaller than its indices."""
    for traced in (problem.mask, problem.score):
        if traced is None:
            continue
        check_tables(traced, batch=shape.batch, nheads=shape.nheads, seqlen_q=shape.seqlen_q, seqlen_k=shape.seqlen_k)
        for slot, table in zip(traced.graph.tables, traced.tables, strict=True):
            if isinstance(table, torch.Tensor):
                right = table.device == device
            else:
                right = is_cupy(table) and table.device.id == device.index
            if not right:
                raise TensorError(
                    f"The captured tensor {slot.name!r} must be on {device}, as q, k and v are, but got"
                    f" {type(table).__name__} on {getattr(table, 'device', 'the CPU')}. Move it with .to(q.device)."
                )


def _family(spec: AttentionSpec, q: Any, k: Any, v: Any, inputs: Inputs, backend: Backend) -> Family:
    """The best family that reads these tensors in place; what a better one cannot read is logged once."""
    choice = choose_family(
        spec,
        backend.arch(inputs.device_index),
        name=_only_family,
        strides={name: tuple(tensor.stride()[:3]) for name, tensor in (("q", q), ("k", k), ("v", v))},
        shape=inputs.shape,
    )
    for reason in choice.passed_over:
        if reason not in _said and len(_said) < MAX_SAID:
            _said.add(reason)
            log.warning("%s Slower %s is used: make them contiguous to avoid that.", reason, choice.family.name)
    return choice.family


@contextmanager
def only_family(name: str) -> Iterator[None]:
    """Within the block, calls prepared in this process use the family called `name`. Raises UnsupportedError."""
    global _only_family
    saved = _only_family
    _only_family = family_named(name).name
    try:
        yield
    finally:
        _only_family = saved


def _resolve(spec: AttentionSpec, family: Family, shape: ProblemShape, device: int, backend: Backend) -> Resolution:
    """The config of a call; lengths within an eighth of an octave share one look-up."""
    shape = rounded_shape(shape)
    key = (backend, spec, family.name, shape, device)
    found = _resolutions.get(key)
    if found is None:
        found = choose_config(
            spec,
            backend.arch(device),
            backend.device_name(device),
            shape,
            family,
            refusal=lambda config: backend.refusal(spec, config, family, device),
            default=lambda: backend.default_config(spec, family, device),
        )
        remember(_resolutions, key, found, MAX_KEPT)
    return found
