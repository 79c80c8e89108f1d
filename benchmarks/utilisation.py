"""How busy forward_sm90 keeps the tensor cores, by the SMs' own cycle counters, which clocks and power do not move.

    python benchmarks/utilisation.py [--case "d128 causal B1 N16384 H16"] [--config "B_c=128 q_stages=2"] [--json FILE]

utilisation = FLOP / (cycles * SMs * 4096): 4096 FLOP is what the dense 16-bit products of one SM do in one cycle, FLOP
is 4 B H N M d, halved when causal, and cycles is the slowest block's, from its first thread's entry to its last
warpgroup's exit. Each consumer warpgroup reads clock64() twice; the readings are put into the kernel's generated text,
and the outputs compared bit by bit with those of the text without them. Medians over `REPEATS` launches, each behind
others, so that the GPU is under load. TFLOP/s is by events around that launch, SM clock = cycles / time; the events'
own microseconds make both a little low for short launches. Not defined for schedule=grid: more blocks than SMs.

`--case` and `--config` may be repeated; a config names what differs from the one that flashsmith would choose. Without
a GPU, `--fake` compiles the kernels and makes the readings up.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from clock_readings import OneKernel, read_clocks, with_clocks

from flashsmith.generator.errors import FlashsmithError, SpecError
from flashsmith.generator.families import family_named
from flashsmith.generator.families.base import KernelConfig
from flashsmith.generator.rendering import render
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime import nvrtc
from flashsmith.runtime.attention import explain, only_family, use_backend
from flashsmith.runtime.bench import BenchCase, machine
from flashsmith.runtime.commands.naming import short_config
from flashsmith.runtime.commands.options import parse_length, with_settings
from flashsmith.runtime.compiler import CompiledKernel, compile_kernel, compile_text
from flashsmith.runtime.device import Backend, CudaBackend
from flashsmith.runtime.launch import Plan, prepare
from flashsmith.runtime.tensors import torch_dtype

FAMILY = "forward_sm90"
#: Dense 16-bit tensor-core FLOP of one SM and cycle on compute capability 9.0.
FLOP_PER_CYCLE = 4096
REPEATS = 10
#: Launches right before each measured one: so many at least, and for so long.
LEAD = 3
LEAD_MS = 10.0
CASES = ("d128 full N16384", "d128 causal N16384", "d64 full N16384", "d256 full N16384", "d128 full N1024")

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case_of(text: str) -> BenchCase:
    """The case in "[fp16] d128[/64] full|causal [B1] N16k [M...] [H16[/4]]"; B and H are the usual benchmark's.

    Raises SpecError.
    """
    values: dict[str, str] = {}
    for word in text.split():
        kind = {"full": "mask", "causal": "mask", "bf16": "dtype", "fp16": "dtype"}.get(word, word[:1])
        if kind in values or kind not in ("mask", "dtype", "d", "B", "N", "M", "H"):
            raise SpecError(f'A case reads like "d128 causal B1 N16384 H16", but {text!r} has {word!r}.')
        values[kind] = word if kind in ("mask", "dtype") else word[1:]
    missing = {"d", "mask", "N"} - set(values)
    if missing:
        raise SpecError(f'A case reads like "d128 causal B1 N16384 H16", but {text!r} lacks {", ".join(missing)}.')

    def pair(kind: str, default: int) -> tuple[int, int]:
        first, _, second = values.get(kind, str(default)).partition("/")
        one = parse_length(first, name=kind)
        return one, parse_length(second, name=kind) if second else one

    head_dim, head_dim_v = pair("d", 128)
    seqlen_q = pair("N", 0)[0]
    heads, heads_k = pair("H", max(1, 2048 // head_dim))
    batch = pair("B", max(1, 16384 // seqlen_q))[0]
    shape = ProblemShape(batch, seqlen_q, pair("M", seqlen_q)[0], heads, heads_k)
    return BenchCase(shape, values.get("dtype", "bf16"), head_dim, head_dim_v, causal=values["mask"] == "causal")


@dataclass(frozen=True, slots=True)
class Row:
    """One case and config. `cycles`, `mean_cycles` (the slowest block's, all blocks' mean) and `ms` are by launch."""

    case: BenchCase
    config: KernelConfig
    source: str
    sms: int
    cycles: tuple[int, ...] = ()
    mean_cycles: tuple[float, ...] = ()
    ms: tuple[float, ...] = ()
    same_bits: bool = True
    report: str = ""
    clocked_report: str = ""
    note: str = ""

    @property
    def utilisation(self) -> float:
        """Between 0 and 1; NaN where it is not defined."""
        if not self.cycles:
            return math.nan
        return self.case.flop / (statistics.median(self.cycles) * self.sms * FLOP_PER_CYCLE)

    @property
    def tflops(self) -> float:
        return self.case.flop / statistics.median(self.ms) / 1e9 if self.ms else math.nan

    @property
    def sm_clock_mhz(self) -> float:
        if not self.ms:
            return math.nan
        return statistics.median(c / ms for c, ms in zip(self.cycles, self.ms, strict=True)) / 1e3

    @property
    def balance(self) -> float:
        """The blocks' mean cycles over the slowest one's: 1 where all end together."""
        if not self.cycles:
            return math.nan
        return statistics.median(m / c for m, c in zip(self.mean_cycles, self.cycles, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; numbers that are not defined are None."""
        names = ("utilisation", "tflops", "sm_clock_mhz", "balance")
        numbers = {name: None if math.isnan(value := getattr(self, name)) else value for name in names}
        return {
            "case": str(self.case), **self.case.shape.to_dict(), "dtype": self.case.dtype,
            "head_dim": self.case.head_dim, "head_dim_v": self.case.head_dim_v, "causal": self.case.causal,
            "config": self.config.to_dict(), "source": self.source, **numbers, "flop": self.case.flop, "sms": self.sms,
            "cycles": list(self.cycles), "ms": list(self.ms), "same_bits": self.same_bits, "report": self.report,
            "clocked_report": self.clocked_report, "note": self.note,
        }  # fmt: skip

    def __str__(self) -> str:
        head = f"{self.case!s:34s} {short_config(self.config.to_dict()):38s} {self.source:8s}"
        if not self.cycles:
            return f"{head} {self.note}"
        reports = self.report if self.report == self.clocked_report else f"{self.report} -> {self.clocked_report}"
        return (
            f"{head} {statistics.median(self.cycles):11.0f} {100 * self.utilisation:6.1f} {self.tflops:8.1f}"
            f" {self.sm_clock_mhz:7.0f} {self.balance:8.3f}  {'same' if self.same_bits else 'OTHER'}  {reports}"
        )


class Gpu:
    """Torch's current GPU."""

    real = True

    def __init__(self, device: torch.device, backend: Backend) -> None:
        self.device, self.backend = device, backend
        self.arch, self.sms = backend.arch(device.index or 0), backend.sm_count(device.index or 0)

    def with_kernel(self, compiled: CompiledKernel) -> Any:
        return OneKernel(compiled)

    def launch(self, plan: Plan, inputs: Tensors, out: torch.Tensor, lse: torch.Tensor) -> None:
        stream = self.backend.current_stream(plan.device_index)
        q, k, v = inputs
        plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), (), stream)

    def timed(self, call: Callable[[], None], case: BenchCase, *, lead: int) -> float:
        """Milliseconds of the last of `lead` + 1 calls."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(lead):
            call()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def clocks(self, backend: Any, case: BenchCase, *, blocks: int, groups: int) -> torch.Tensor:
        return read_clocks(backend.function, blocks=blocks, groups=groups)


@contextmanager
def fake_gpu() -> Iterator[Gpu]:
    """A GPU on which half of the tensor cores' cycles are used at 1500 MHz; kernels compile, and give zeros."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from helpers_attention import FakeBackend

    class FakeGpu(Gpu):
        real = False

        def with_kernel(self, compiled: CompiledKernel) -> Any:
            return FakeBackend()

        def launch(self, plan: Plan, inputs: Tensors, out: torch.Tensor, lse: torch.Tensor) -> None:
            super().launch(plan, inputs, out, lse)
            out.zero_()
            lse.zero_()

        def timed(self, call: Callable[[], None], case: BenchCase, *, lead: int) -> float:
            call()
            return self._cycles(case) / 1.5e6

        def clocks(self, backend: Any, case: BenchCase, *, blocks: int, groups: int) -> torch.Tensor:
            # Block 0 takes longest; the first warpgroup begins first, the last one ends last.
            late = self._cycles(case) // 10 * torch.arange(groups)
            first = torch.arange(blocks).view(-1, 1) + late
            last = (self._cycles(case) - late.flip(0)).expand(blocks, groups)
            return torch.stack((first, last), dim=-1)

        def _cycles(self, case: BenchCase) -> int:
            return round(case.flop / (self.sms * FLOP_PER_CYCLE) * 2)

    backend = FakeBackend()
    with use_backend(backend):
        yield FakeGpu(torch.device("cpu"), backend)


def inputs_of(case: BenchCase, device: torch.device) -> Tensors:
    """Normal q, k and v, (batch, seqlen, nheads, head_dim)."""
    generator = torch.Generator(device).manual_seed(0)
    shape, dtype = case.shape, torch_dtype(case.dtype)
    q, k, v = (
        torch.randn(shape.batch, rows, heads, dim, generator=generator, device=device, dtype=dtype)
        for rows, heads, dim in (
            (shape.seqlen_q, shape.nheads, case.head_dim),
            (shape.seqlen_k, shape.nheads_k, case.head_dim),
            (shape.seqlen_k, shape.nheads_k, case.head_dim_v),
        )
    )
    return q, k, v


def measure(case: BenchCase, config: KernelConfig, source: str, inputs: Tensors, gpu: Gpu) -> Row:
    """The row of one case and config; where it is not defined, `note` says why. Raises FlashsmithError."""
    values = config.to_dict()
    row = Row(case, config, source, gpu.sms)
    if values["schedule"] == "grid":
        return replace(row, note="not defined: schedule=grid has one block per tile, not one per SM")
    family, problem, groups = family_named(FAMILY), case.problem, int(values["num_warpgroups"])
    text = with_clocks(render(problem.spec, config, gpu.arch, family=family), blocks=gpu.sms, groups=groups)
    compiled = (
        compile_kernel(problem.spec, config, gpu.arch, family=family, gate=False, run_here=gpu.real),
        compile_text(text, gate=False),
    )
    blocks = family.geometry(problem.spec, config, case.shape, sm_count=gpu.sms).grid[0]
    backends = [gpu.with_kernel(one) for one in compiled]
    results = []
    cycles, means, times = [], [], []
    for backend in backends:
        plan = prepare(
            problem, config, family=family, shape=case.shape, q=inputs[0], k=inputs[1], v=inputs[2],
            softmax_scale=case.head_dim**-0.5, backend=backend,
        )  # fmt: skip
        out = torch.full(plan.out_shape, math.nan, dtype=plan.dtype, device=gpu.device)
        lse = torch.full(plan.lse_shape, math.nan, device=gpu.device)
        gpu.launch(plan, inputs, out, lse)
        results.append((out, lse))
        if backend is backends[0]:
            continue
        call = partial(gpu.launch, plan, inputs, out, lse)
        lead = max(LEAD, round(LEAD_MS / max(gpu.timed(call, case, lead=LEAD), 1e-2)))
        for _ in range(REPEATS):
            times.append(gpu.timed(call, case, lead=lead))
            clocks = gpu.clocks(backend, case, blocks=blocks, groups=groups)
            of_block = clocks[..., 1].amax(1) - clocks[..., 0].amin(1)
            if int(of_block.min()) <= 0:
                raise FlashsmithError(f"Block {int(of_block.argmin())} of {case} has left no readings of its clock.")
            cycles.append(int(of_block.max()))
            means.append(float(of_block.double().mean()))
    same = all(_same_bits(one, other) for one, other in zip(*results, strict=True))
    for backend in backends if gpu.real else ():
        backend.free()
    return replace(
        row, cycles=tuple(cycles), mean_cycles=tuple(means), ms=tuple(times), same_bits=same,
        report=str(compiled[0].report), clocked_report=str(compiled[1].report),
    )  # fmt: skip


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are equal to the bit and written throughout."""
    return not bool(one.isnan().any()) and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def rows_of(cases: Sequence[BenchCase], configs: Sequence[str], gpu: Gpu) -> Iterator[Row]:
    """A row for each case and config text, the chosen config's where there is none."""
    for case in cases:
        inputs = inputs_of(case, gpu.device)
        with only_family(FAMILY):
            chosen = explain(*inputs, causal=case.causal)
        for text in configs or ("",):
            config = with_settings(chosen.config, text.split())
            source = "given" if config != chosen.config else chosen.source
            excluded = family_named(FAMILY).exclusion(case.problem.spec, config, gpu.arch)
            if excluded is not None:
                yield Row(case, config, source, gpu.sms, note=f"excluded: {excluded.reason}")
                continue
            try:
                yield measure(case, config, source, inputs, gpu)
            except FlashsmithError as error:
                yield Row(case, config, source, gpu.sms, note=f"failed: {str(error).splitlines()[0]}")


def report(cases: Sequence[BenchCase], configs: Sequence[str], gpu: Gpu, file: str) -> int:
    """Prints the rows and writes them to `file`, "" for none. 1 where an output differs or a row failed, else 0."""
    facts = machine(gpu.device) | {"nvrtc": nvrtc.compiler().version}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'case':34s} {'config':38s} {'source':8s} {'cycles':>11s} {'util %':>6s} {'TFLOP/s':>8s} {'SM MHz':>7s}"
          f" {'balance':>8s}  bits  registers")  # fmt: skip
    rows = []
    for row in rows_of(cases, configs, gpu):
        rows.append(row)
        print(row, flush=True)
    if file:
        command = shlex.join(["python", *sys.argv])
        found = {"machine": facts, "command": command, "repeats": REPEATS, "rows": [row.to_dict() for row in rows]}
        Path(file).write_text(json.dumps(found, indent=1) + "\n")
    return int(any(not row.same_bits or row.note.startswith("failed") for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description="tensor-core utilisation of forward_sm90 by the SMs' cycle counters")
    parser.add_argument("--case", action="append", default=[], help='like "d128 causal B1 N16384 H16"; may be repeated')
    parser.add_argument("--config", action="append", default=[], help='like "B_c=128 q_stages=2"; may be repeated')
    parser.add_argument("--json", default="", metavar="FILE", help="write the rows there too")
    parser.add_argument("--fake", action="store_true", help="no GPU: compile, launch nothing, make the readings up")
    options = parser.parse_args()
    try:
        cases = [case_of(text) for text in options.case or CASES]
        with torch.no_grad():
            if options.fake:
                with fake_gpu() as gpu:
                    return report(cases, options.config, gpu, options.json)
            if not torch.cuda.is_available():
                sys.exit("utilisation.py runs kernels on a GPU, and torch sees none: --fake makes the readings up.")
            device = torch.device("cuda", torch.cuda.current_device())
            return report(cases, options.config, Gpu(device, CudaBackend()), options.json)
    except FlashsmithError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(main())
