"""What is to be tuned, and what came out: plain values that travel to worker processes and into the log."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...generator.arch import Arch
from ...generator.errors import TraceError
from ...generator.families.base import KernelConfig
from ...generator.spec import ProblemShape
from ..store_schema import Record
from .log import Trial

if TYPE_CHECKING:
    from ..problem import Problem

#: Tokens of one call in the usual benchmark: the batch is this over the length (as in FlashAttention's benchmarks).
TOKENS = 16 * 1024
#: nheads * head_dim of the usual benchmark.
MODEL_WIDTH = 2048


@dataclass(frozen=True, slots=True)
class TuneProblem:
    """The keyword arguments of `flashsmith.attention` that make a spec, in a form every process can rebuild.

    `alibi` stands for slopes 2^(-8 (h + 1) / nheads). `mask_mod` and `score_mod` name functions: "module:function" or
    "path/to/file.py:function".
    """

    dtype: str = "bf16"
    head_dim: int = 128
    head_dim_v: int = 0
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    mask_mod: str = ""
    score_mod: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TuneProblem:
        left, right = data["window_size"]
        return cls(**{**data, "window_size": (left, right)})

    def traced(self, *, nheads: int = 1, device: str = "cpu") -> Problem:
        """The spec with the values of its mask and score; ALiBi's slopes for `nheads` on `device`."""
        from ..problem import problem_of

        return problem_of(
            dtype=self.dtype,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            causal=self.causal,
            window_size=self.window_size,
            softcap=self.softcap,
            alibi_slopes=_slopes(nheads, device) if self.alibi else None,
            mask_mod=named_function(self.mask_mod) if self.mask_mod else None,
            score_mod=named_function(self.score_mod) if self.score_mod else None,
        )


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """One tuning run of one problem.

    - `shapes`: the buckets, each tuned on its own. `gpu`: a device index as "cuda:0", or "" to predict for `arch`.
    - `gpu_name`: with a prediction, the GPU model (default: the architecture's typical one, stored for any GPU of it).
    - `budget_s`: wall seconds for the whole request; `trials`: timed configs a bucket at most.
    - `exhaustive`: time every valid config once, whatever the budget of trials.
    - `max_compile`: with a prediction, how many configs are compiled after the cost model's first ranking.
    - `prove`: with a prediction, how many leaders a bucket are proved on the emulator until one is right.
    - `resume`: go on with an interrupted run's trials, and keep a stored prediction that is stronger than the new one.
    - `root`: where the YAML goes (default: the user's configs). `log`: the trial log (default: in the cache folder).
    """

    problem: TuneProblem
    shapes: tuple[ProblemShape, ...]
    arch: Arch
    gpu: str = ""
    gpu_name: str | None = None
    family: str | None = None
    budget_s: float = 60.0
    trials: int = 60
    seed: int = 0
    exhaustive: bool = False
    max_compile: int = 96
    prove: int = 3
    jobs: int = 0
    root: Path | None = None
    log: Path | None = None
    resume: bool = True
    trial_seconds: float = 30.0

    @property
    def num_jobs(self) -> int:
        """Compile processes: as asked, else one per usable core, at most 16."""
        return self.jobs or min(16, usable_cores())


@dataclass(frozen=True, slots=True)
class BucketResult:
    """One tuned bucket: the record that was stored, its config, and how it was found."""

    shape: ProblemShape
    config: KernelConfig
    record: Record
    trials: tuple[Trial, ...]
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class TuneResult:
    """Every bucket of a request, the files written, and what the search looked at.

    `kept` holds stored records that outweigh a bucket's own, which was then not stored. `space` counts the valid
    configs, `compiled` those that were compiled, `outcomes` the candidates by class.
    """

    buckets: tuple[BucketResult, ...]
    path: Path | None
    log: Path
    space: int
    compiled: int
    status: str
    seconds: float
    outcomes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kept: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of the run, for a progress bar: `phase` is compile, time, prove, final, or bucket for a finished one of a
    campaign, whose spec `words` name; `best_ms` so far if known."""

    phase: str
    done: int
    total: int
    shape: ProblemShape | None = None
    best_ms: float | None = None
    words: str = ""


ProgressFunction = Callable[[Progress], None]


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usual_shape(
    seqlen_q: int,
    *,
    head_dim: int,
    seqlen_k: int = 0,
    batch: int = 0,
    nheads: int = 0,
    nheads_k: int = 0,
    gqa_ratio: int = 0,
) -> ProblemShape:
    """The benchmark's sizes for one length: 16k tokens a call and a model width of 2048, where nothing else is said.

    With a `gqa_ratio` (nheads / nheads_k) the heads are the nearest number that it divides.
    """
    nheads = nheads or max(1, MODEL_WIDTH // head_dim)
    if gqa_ratio:
        nheads_k = max(1, round(nheads / gqa_ratio))
        nheads = nheads_k * gqa_ratio
    return ProblemShape(
        batch=batch or max(1, TOKENS // max(seqlen_q, 1)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k or seqlen_q,
        nheads=nheads,
        nheads_k=nheads_k or nheads,
    )


def named_function(reference: str) -> Callable[..., Any]:
    """The function that "module:function" or "file.py:function" names. Raises TraceError."""
    place, separator, name = reference.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise TraceError(f"A function is named as module:function or file.py:function, but got {reference!r}.")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, name)
    except (ImportError, OSError, AttributeError, SyntaxError) as error:
        raise TraceError(f"{reference!r} cannot be loaded: {error}. Check the path and the function's name.") from None
    if not callable(function):
        raise TraceError(f"{reference!r} must be a function, but is {type(function).__name__}.")
    result: Callable[..., Any] = function
    return result


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    name = "flashsmith_mods_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _slopes(nheads: int, device: str) -> Any:
    import torch

    heads = torch.arange(1, nheads + 1, dtype=torch.float32, device=device)
    return torch.exp2(-8.0 * heads / nheads)
