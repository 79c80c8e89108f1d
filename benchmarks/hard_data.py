"""What peaked softmax costs: forward_sm90's softmax "optimistic" and "wary" beside "exact" on scaled queries.

    python benchmarks/hard_data.py [--causal] [--config "B_c=128"] [--json FILE]

Queries are normal data times 1, 4, 16 and 64: the larger, the more often a later tile holds a new row maximum, which
"exact" takes first in every tile, and the others find out. In each cell the three differ in the softmax alone; the rest
is the config that flashsmith would choose there, or `--config`'s changes of it. They are timed in turns, in shuffled
order (`flashsmith.runtime.timing`), after the last rows of each were held against the fp64 reference. The ratio is
time of exact / time: above 1 is faster than exact. TFLOP/s by 4 B H N^2 d, halved when causal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from flashsmith.generator.errors import FlashsmithError
from flashsmith.generator.families import family_named
from flashsmith.generator.families.base import KernelConfig
from flashsmith.generator.families.forward_sm90 import SOFTMAX
from flashsmith.generator.spec import AttentionSpec, ProblemShape
from flashsmith.runtime import nvrtc
from flashsmith.runtime.attention import explain, only_family
from flashsmith.runtime.bench import CHECKED_ROWS, BenchCase, machine
from flashsmith.runtime.commands.naming import short_config
from flashsmith.runtime.commands.options import with_settings
from flashsmith.runtime.device import Backend, CudaBackend
from flashsmith.runtime.launch import prepare
from flashsmith.runtime.reference import attention_16bit, attention_reference
from flashsmith.runtime.tensors import torch_dtype
from flashsmith.runtime.timing import Call, Stopwatch, Timing, time_interleaved
from flashsmith.runtime.tune.compile_pool import CompilePool
from flashsmith.runtime.verify import allowed_error, max_error

FAMILY = "forward_sm90"
SCALES = (1, 4, 16, 64)
BUDGET_MS = 30.0
#: Tokens and width (nheads * head_dim) of every case: 200 MB of inputs, four times the L2 cache of an H100 or H200.
TOKENS, WIDTH = 16384, 2048

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: Of one case: the config that flashsmith would choose, with each softmax.
Variants = dict[str, KernelConfig]
#: What is wrong with an output, "" if nothing is.
Checker = Callable[[torch.Tensor], str]


@dataclass(frozen=True, slots=True)
class Row:
    """One softmax on one case with queries times `scale`. `timing` is None where it was not timed: `note` says why."""

    case: BenchCase
    scale: int
    softmax: str
    config: KernelConfig
    timing: Timing | None
    ratio: float | None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        return None if self.timing is None else self.case.flop / self.timing.median_ms / 1e9

    def to_dict(self) -> dict[str, Any]:
        """Plain data; times in ms."""
        return {
            "case": str(self.case), **self.case.shape.to_dict(), "dtype": self.case.dtype,
            "head_dim": self.case.head_dim, "causal": self.case.causal, "q_scale": self.scale, "softmax": self.softmax,
            "config": self.config.to_dict(), "timing": None if self.timing is None else self.timing.to_dict(),
            "tflops": self.tflops, "ratio_to_exact": self.ratio, "note": self.note,
        }  # fmt: skip


def cases_of(
    *, causal: bool, seqlens: Sequence[int] = (4096, 16384), head_dims: Sequence[int] = (64, 128)
) -> list[BenchCase]:
    cases = []
    for dtype, head_dim, seqlen in product(("bf16", "fp16"), head_dims, seqlens):
        shape = ProblemShape(TOKENS // seqlen, seqlen, seqlen, WIDTH // head_dim, WIDTH // head_dim)
        cases.append(BenchCase(shape, dtype, head_dim, causal=causal))
    return cases


def inputs_of(case: BenchCase, device: torch.device) -> Tensors:
    """Normal q, k and v, (batch, seqlen, nheads, head_dim)."""
    generator = torch.Generator(device).manual_seed(0)
    size = (case.shape.batch, case.shape.seqlen_q, case.shape.nheads, case.head_dim)
    q, k, v = (torch.randn(size, generator=generator, device=device, dtype=torch_dtype(case.dtype)) for _ in range(3))
    return q, k, v


def variants_of(case: BenchCase, settings: str, device: torch.device) -> Variants:
    """The chosen config, changed by `settings`, with each softmax."""
    with only_family(FAMILY):
        chosen = explain(*inputs_of(case, device), causal=case.causal).config
    return {name: with_settings(chosen, [*settings.split(), f"softmax={name}"]) for name in SOFTMAX}


def compile_all(variants: dict[BenchCase, Variants], backend: Backend) -> None:
    """Puts every kernel into the cache, several processes at once: a failure is told by the one who asks for it."""
    family, arch = family_named(FAMILY), backend.arch(backend.current_device())
    by_spec: dict[AttentionSpec, dict[KernelConfig, None]] = {}
    for case, configs in variants.items():
        by_spec.setdefault(case.problem.spec, {}).update(dict.fromkeys(configs.values()))

    def compile_spec(spec: AttentionSpec) -> None:
        with CompilePool(spec, arch, family, jobs=max(1, (os.cpu_count() or 1) // len(by_spec))) as pool:
            list(pool.compile(list(by_spec[spec])))

    with ThreadPoolExecutor(len(by_spec)) as threads:
        list(threads.map(compile_spec, by_spec))


def checker_of(case: BenchCase, inputs: Tensors) -> Checker:
    """A function that says what is wrong with the last rows of an output's last head, "" if nothing is."""
    q, k, v = inputs
    q, k, v = q[-1:, -CHECKED_ROWS:, -1:], k[-1:, :, -1:], v[-1:, :, -1:]
    problem = case.problem
    exact, _ = attention_reference(q, k, v, mask=problem.mask, score=problem.score)
    allowed = allowed_error(exact, attention_16bit(q, k, v, mask=problem.mask, score=problem.score))

    def fault(out: torch.Tensor) -> str:
        error = max_error(out[-1:, -CHECKED_ROWS:, -1:], exact)
        return "" if error <= allowed else f"wrong: off by {error:.2e}, {allowed:.2e} is allowed"

    return fault


def call_of(case: BenchCase, config: KernelConfig, inputs: Tensors, backend: Backend) -> tuple[Call, torch.Tensor, str]:
    """The call, the output it writes, and what the build gate has against the kernel ("" for nothing)."""
    q, k, v = inputs
    family, problem = family_named(FAMILY), case.problem
    plan = prepare(
        problem, config, family=family, shape=case.shape, q=q, k=k, v=v, softmax_scale=case.head_dim**-0.5,
        backend=backend,
    )  # fmt: skip
    out = torch.full(plan.out_shape, math.nan, dtype=plan.dtype, device=q.device)

    def call(_: int) -> None:
        stream = backend.current_stream(plan.device_index)
        plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0, (), stream)

    return call, out, backend.refusal(problem.spec, config, family, plan.device_index)


def measure(
    case: BenchCase,
    variants: Variants,
    *,
    device: torch.device,
    backend: Backend,
    scales: Sequence[int] = SCALES,
    stopwatch: Stopwatch | None = None,
    check: Callable[[BenchCase, Tensors], Checker] = checker_of,
) -> Iterator[list[Row]]:
    """The rows of each scale. What cannot run, or is wrong, is not timed."""
    q, k, v = inputs_of(case, device)
    for scale in scales:
        inputs = (q * scale, k, v)
        fault_of = check(case, inputs)
        calls: dict[str, Call] = {}
        notes: dict[str, str] = {}
        for name, config in variants.items():
            try:
                call, out, notes[name] = call_of(case, config, inputs, backend)
            except FlashsmithError as error:
                notes[name] = f"failed: {str(error).splitlines()[0]}"
                continue
            call(0)
            fault = fault_of(out)
            notes[name] = fault or notes[name]
            calls |= {} if fault else {name: call}
        timings = time_interleaved(calls, budget_ms=BUDGET_MS, seed=scale, stopwatch=stopwatch) if calls else {}
        exact = timings.get("exact")
        rows = []
        for name, config in variants.items():
            timing = timings.get(name)
            ratio = None if exact is None or timing is None else exact.median_ms / timing.median_ms
            rows.append(Row(case, scale, name, config, timing, ratio, notes[name]))
        yield rows


def line_of(rows: Sequence[Row]) -> str:
    """A scale's rows of one case: TFLOP/s of each softmax, ratios of those that are not exact, notes."""
    rates = "".join(f"{'-' if row.tflops is None else f'{row.tflops:.0f}':>11s}" for row in rows)
    ratios = "".join(
        f"{'-' if row.ratio is None else f'{row.ratio:.3f}':>19s}" for row in rows if row.softmax != "exact"
    )
    notes = "".join(f"  {row.softmax}: {row.note}" for row in rows if row.note)
    config = short_config({n: x for n, x in rows[0].config.to_dict().items() if n != "softmax"})
    return f"{rows[0].case!s:32s} {config:27s} x{rows[0].scale:<3d}{rates}{ratios}{notes}"


def main() -> int:
    parser = argparse.ArgumentParser(description="the softmax variants of forward_sm90 on scaled queries")
    parser.add_argument("--causal", action="store_true", help="causal instead of full attention")
    parser.add_argument("--config", default="", help='changes of the chosen config, like "B_c=128 q_stages=2"')
    parser.add_argument("--json", default="", metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("hard_data.py times kernels on a GPU, and torch sees none: run it on a machine with an H100 or H200.")
    device, backend = torch.device("cuda", torch.cuda.current_device()), CudaBackend()
    rows: list[Row] = []
    try:
        facts = machine(device) | {"nvrtc": nvrtc.compiler().version}
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
        titles = "".join(f"{name:>11s}" for name in SOFTMAX)
        ratios = "".join(f"{f'{name} / exact':>19s}" for name in SOFTMAX if name != "exact")
        print(f"{'case':32s} {'config':27s} q   {titles}{ratios}")
        with torch.no_grad():
            variants = {case: variants_of(case, options.config, device) for case in cases_of(causal=options.causal)}
            compile_all(variants, backend)
            for case, of_case in variants.items():
                for found in measure(case, of_case, device=device, backend=backend):
                    print(line_of(found), flush=True)
                    rows += found
    except FlashsmithError as error:
        sys.exit(str(error))
    if options.json:
        command = shlex.join(["python", *sys.argv])
        written = {"machine": facts, "command": command, "rows": [row.to_dict() for row in rows]}
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n")
    return int(any(row.timing is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
