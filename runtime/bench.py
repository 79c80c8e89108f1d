"""flashsmith against torch's scaled_dot_product_attention, case by case, in one run: rows as data.

Every provider gets tensors in its own native layout, is checked against the fp64 reference on a slice, and is timed in
turns with the others in shuffled order, with a cold L2 cache (see `timing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..generator.errors import FlashsmithError, SpecError, TuneError
from ..generator.spec import ProblemShape
from .problem import Problem, problem_of
from .reference import attention_16bit, attention_reference
from .tensors import torch_dtype
from .timing import Call, Stopwatch, Timing, sets_for_cold_l2, time_interleaved
from .verify import allowed_error, max_error

FLASHSMITH = "flashsmith"
#: torch's back ends, by the names of `torch.nn.attention.SDPBackend`.
SDPA = {"sdpa-flash": "FLASH_ATTENTION", "sdpa-cudnn": "CUDNN_ATTENTION", "sdpa-efficient": "EFFICIENT_ATTENTION"}
PROVIDERS = (FLASHSMITH, *SDPA)
#: Rows of one head that are compared with the reference.
CHECKED_ROWS = 64


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One problem at one shape: the keyword arguments of `attention` that torch's function has an answer to, or not."""

    shape: ProblemShape
    dtype: str = "bf16"
    head_dim: int = 128
    head_dim_v: int = 0
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        window = "" if self.window_size == (-1, -1) else f" window{self.window_size[0]},{self.window_size[1]}"
        cap = f" softcap{self.softcap:g}" if self.softcap else ""
        return f"{self.dtype} {dims} {'causal' if self.causal else 'full'}{window}{cap} {self.shape}"

    @property
    def problem(self) -> Problem:
        return problem_of(
            dtype=self.dtype,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            causal=self.causal,
            window_size=self.window_size,
            softcap=self.softcap,
        )

    @property
    def flop(self) -> float:
        """Floating-point operations: 2 * batch * nheads * pairs * (head_dim + head_dim_v).

        `pairs` counts visible (row, key) pairs; for a causal square it is half of all, as is usual in the field.
        """
        return 2.0 * self.shape.batch * self.shape.nheads * self.pairs * (self.head_dim + self.head_dim_v)

    @property
    def pairs(self) -> float:
        n, m = self.shape.seqlen_q, self.shape.seqlen_k
        left, right = self.window_size
        right = 0 if self.causal and right != 0 else right
        if left < 0 and right < 0:
            return float(n) * m
        if left < 0 and right == 0 and n == m:
            return n * m / 2
        first = torch.arange(n, dtype=torch.int64) + (m - n)
        low = torch.zeros_like(first) if left < 0 else (first - left).clamp(0, m)
        high = torch.full_like(first, m) if right < 0 else (first + right + 1).clamp(0, m)
        return float((high - low).clamp(min=0).sum())


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One provider on one case. `timing` is None where it could not run; `note` says why, or what is wrong.

    `used` is the config that flashsmith ran, and where it came from.
    """

    case: BenchCase
    provider: str
    timing: Timing | None
    note: str = ""
    used: str = ""

    @property
    def tflops(self) -> float:
        """TFLOP/s by the case's FLOP formula; NaN without a timing."""
        return math.nan if self.timing is None else self.case.flop / self.timing.median_ms / 1e9

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the case in words and sizes, times in ms, rates in TFLOP/s (None without a timing)."""
        timing = None if self.timing is None else self.timing.to_dict()
        return {
            "case": str(self.case),
            **self.case.shape.to_dict(),
            "dtype": self.case.dtype,
            "head_dim": self.case.head_dim,
            "head_dim_v": self.case.head_dim_v,
            "causal": self.case.causal,
            "window_size": list(self.case.window_size),
            "softcap": self.case.softcap,
            "provider": self.provider,
            "timing": timing,
            "tflops": None if self.timing is None else self.tflops,
            "note": self.note,
            "used": self.used,
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Every row, and the machine: GPU, driver, torch and NVRTC versions."""

    rows: tuple[BenchRow, ...]
    machine: Mapping[str, str]

    def row(self, case: BenchCase, provider: str) -> BenchRow | None:
        return next((r for r in self.rows if r.case == case and r.provider == provider), None)

    def ratio(self, case: BenchCase, rival: str, provider: str = FLASHSMITH) -> float:
        """How many times faster than `rival` `provider` is on `case`; NaN where one of them has no time."""
        rows = (self.row(case, rival), self.row(case, provider))
        times = [math.nan if row is None or row.timing is None else row.timing.median_ms for row in rows]
        return times[0] / times[1]

    def geometric_mean(self, rival: str, provider: str = FLASHSMITH) -> float:
        """The geometric mean of `ratio` over the cases where both have a time; NaN where there are none."""
        cases = dict.fromkeys(row.case for row in self.rows)
        logs = [math.log(r) for r in (self.ratio(case, rival, provider) for case in cases) if not math.isnan(r)]
        return math.exp(sum(logs) / len(logs)) if logs else math.nan

    def to_dict(self) -> dict[str, Any]:
        return {"machine": dict(self.machine), "rows": [row.to_dict() for row in self.rows]}


#: Makes a provider's call for a case on inputs in the layout it names, or raises UnsupportedError.
Factory = Callable[[BenchCase, "InputSets"], Call]


class InputSets:
    """`count` input sets of a case with normal data: `bshd[i]` and `bhsd[i]` are (q, k, v) of equal values."""

    def __init__(self, case: BenchCase, count: int, device: torch.device, *, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        shape, dtype = case.shape, torch_dtype(case.dtype)
        sizes = (
            (shape.batch, shape.seqlen_q, shape.nheads, case.head_dim),
            (shape.batch, shape.seqlen_k, shape.nheads_k, case.head_dim),
            (shape.batch, shape.seqlen_k, shape.nheads_k, case.head_dim_v),
        )
        self.count = count
        self.bshd = [
            tuple(torch.randn(size, generator=generator, device=device, dtype=dtype) for size in sizes)
            for _ in range(count)
        ]
        self.bhsd = [tuple(x.transpose(1, 2).contiguous() for x in qkv) for qkv in self.bshd]


def standard_cases(
    head_dims: Sequence[int] = (64, 128, 256),
    *,
    dtype: str = "bf16",
    causal: Sequence[bool] = (False, True),
    seqlens: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384),
    tokens: int = 16384,
    width: int = 2048,
) -> list[BenchCase]:
    """FlashAttention's own grid: batch * seqlen = `tokens`, nheads * head_dim = `width`, every length and mask."""
    cases = []
    for head_dim in head_dims:
        for is_causal in causal:
            for seqlen in seqlens:
                if seqlen < 1 or tokens < seqlen:
                    raise SpecError(f"seqlens must be from 1 to tokens={tokens}, but got {seqlen}.")
                heads = max(1, width // head_dim)
                shape = ProblemShape(tokens // seqlen, seqlen, seqlen, heads, heads)
                cases.append(BenchCase(shape, dtype, head_dim, causal=is_causal))
    return cases


def bench(
    cases: Sequence[BenchCase],
    *,
    providers: Sequence[str] = PROVIDERS,
    device: str = "cuda",
    budget_ms: float = 150.0,
    seed: int = 0,
    progress: Callable[[BenchCase, tuple[BenchRow, ...]], None] | None = None,
    stopwatch: Stopwatch | None = None,
    factories: Mapping[str, Factory] | None = None,
) -> BenchResult:
    """Times `providers` on every case. A provider that cannot run a case, or is wrong on it, gets a row that says so.

    `progress` is called after each case with its rows. Raises SpecError for an unknown provider.
    """
    known = dict(factories) if factories is not None else default_factories()
    unknown = [name for name in providers if name not in known]
    if unknown:
        raise SpecError(f"Unknown provider {unknown[0]!r}. Known: {', '.join(known)}.")
    where = torch.device(device)
    rows: list[BenchRow] = []
    for case in cases:
        made = _bench_case(case, {name: known[name] for name in providers}, where, budget_ms, seed, stopwatch)
        rows.extend(made)
        if progress is not None:
            progress(case, made)
    return BenchResult(tuple(rows), machine(where))


def default_factories() -> dict[str, Factory]:
    """flashsmith, and torch's back ends."""
    return {FLASHSMITH: _flashsmith_call, **{name: _sdpa_factory(name) for name in SDPA}}


def _bench_case(
    case: BenchCase,
    factories: Mapping[str, Factory],
    device: torch.device,
    budget_ms: float,
    seed: int,
    stopwatch: Stopwatch | None,
) -> tuple[BenchRow, ...]:
    data = InputSets(case, _set_count(case, device), device, seed=seed)
    exact, allowed = _slice_reference(case, data)
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    used: dict[str, str] = {}
    for name, factory in factories.items():
        try:
            call = factory(case, data)
            out = call(0)
            if name == FLASHSMITH:
                used[name] = _config_used()
        except (FlashsmithError, RuntimeError) as error:
            notes[name] = str(error).partition("\n")[0][:200]
            continue
        error_here = max_error(_slice_of(out, name, case), exact)
        if error_here <= allowed:
            calls[name] = call
        else:
            notes[name] = f"wrong: off by {error_here:.2e}, {allowed:.2e} is allowed"
    timings: dict[str, Timing] = {}
    try:
        timings = time_interleaved(calls, sets=data.count, budget_ms=budget_ms, seed=seed, stopwatch=stopwatch)
    except TuneError as error:
        notes.update(dict.fromkeys(calls, str(error)))
    return tuple(BenchRow(case, name, timings.get(name), notes.get(name, ""), used.get(name, "")) for name in factories)


def _set_count(case: BenchCase, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    shape = case.shape
    keys = shape.batch * shape.seqlen_k * shape.nheads_k * (case.head_dim + case.head_dim_v)
    per_set = 2 * (shape.batch * shape.seqlen_q * shape.nheads * case.head_dim + keys)
    free, _ = torch.cuda.mem_get_info(device)
    # Each set exists in two layouts.
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return sets_for_cold_l2(per_set, l2_bytes, free_bytes=free // 2)


def _slice_reference(case: BenchCase, data: InputSets) -> tuple[torch.Tensor, float]:
    """The fp64 reference of the last rows of the last head of the last item, and the error that is allowed there."""
    q, k, v = data.bshd[0]
    q, k, v = q[-1:, -CHECKED_ROWS:, -1:], k[-1:, :, -1:], v[-1:, :, -1:]
    problem = case.problem
    mods: dict[str, Any] = {"mask": problem.mask, "score": problem.score}
    exact, _ = attention_reference(q, k, v, **mods)
    return exact, allowed_error(exact, attention_16bit(q, k, v, **mods))


def _slice_of(out: Any, provider: str, case: BenchCase) -> torch.Tensor:
    out = out[0] if isinstance(out, tuple) else out
    out = out.transpose(1, 2) if provider in SDPA else out
    found: torch.Tensor = out[-1:, -CHECKED_ROWS:, -1:]
    return found


def _flashsmith_call(case: BenchCase, data: InputSets) -> Call:
    from .attention import attention

    flags: dict[str, Any] = {"causal": case.causal, "window_size": case.window_size, "softcap": case.softcap}
    return lambda i: attention(*data.bshd[i], **flags)


def _config_used() -> str:
    from .attention import last_plan

    record = last_plan()
    return "" if record is None else f"{record.family} {record.config} ({record.source})"


def _sdpa_factory(name: str) -> Factory:
    def factory(case: BenchCase, data: InputSets) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if case.window_size != (-1, -1) or case.softcap:
            raise SpecError("torch's function has no window and no softcap.")
        if case.causal and case.shape.seqlen_q != case.shape.seqlen_k:
            raise SpecError("torch's is_causal is aligned top-left.")
        backend = getattr(SDPBackend, SDPA[name])
        attend = torch.nn.functional.scaled_dot_product_attention
        grouped = case.shape.nheads != case.shape.nheads_k

        def call(i: int) -> torch.Tensor:
            q, k, v = data.bhsd[i]
            with sdpa_kernel([backend]):
                return attend(q, k, v, is_causal=case.causal, enable_gqa=grouped)

        return call

    return factory


def machine(device: torch.device) -> dict[str, str]:
    """What a table of numbers must name: GPU, its maximal SM clock, driver, torch and CUDA versions."""
    from flashsmith import __version__

    facts = {"flashsmith": __version__, "torch": str(torch.__version__)}
    if device.type == "cuda":
        from . import driver

        info = driver.device_info(torch.cuda.current_device() if device.index is None else device.index)
        facts |= {
            "gpu": info.name,
            "sms": str(info.sm_count),
            "max_sm_clock_mhz": str(info.sm_clock_khz // 1000),
            "driver": info.driver_version,
            "cuda": str(torch.version.cuda),
        }
    return facts
