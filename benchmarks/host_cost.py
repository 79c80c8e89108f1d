"""The host cost of one eager call from Python, with everything cached: flashsmith.attention beside torch's SDPA.

    python benchmarks/host_cost.py [--json] [--calls 1000]

Every kernel family that runs on the GPU is measured, the best one first, and then the parts of its call. The tensors
are so small that the GPU is done before the next call is made: what is measured is Python, the allocations and the
launch. Each number is the median over rounds of the mean cost of `--calls` calls in a row, in microseconds; all take
turns within a round. Without a GPU, `--fake` leaves the launch out and uses CPU tensors.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROUNDS = 15
#: Calls in a row of a part: of so many launches the GPU's queue holds all, even where they come faster than they run.
BURST = 250
#: Calls before a round's measurement: the first ones after a change of the family look their plans up.
WARM_UP = 5

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Timed:
    """What is timed: `make` gives the callable within the `family` or SDPA's `backend` that it is to use."""

    make: Callable[[], Callable[[], object]]
    family: str = ""
    backend: Any = None
    count: int | None = None

    def context(self) -> AbstractContextManager[Any]:
        from torch.nn.attention import sdpa_kernel

        from flashsmith.runtime.attention import only_family

        if self.family:
            return only_family(self.family)
        return nullcontext() if self.backend is None else sdpa_kernel([self.backend])


def inputs(device: str) -> Tensors:
    generator = torch.Generator(device).manual_seed(0)
    made = [torch.randn(1, 128, 4, 64, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3)]
    return made[0], made[1], made[2]


def attention_calls(tensors: Tensors) -> dict[str, Callable[[], object]]:
    from flashsmith import attention

    q, k, v = tensors
    slopes = torch.full((4,), 0.1, device=q.device)
    window = 32

    def mask(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return q_idx - kv_idx < window

    return {
        "attention": lambda: attention(q, k, v),
        "attention causal": lambda: attention(q, k, v, causal=True),
        "attention causal, LSE": lambda: attention(q, k, v, causal=True, return_lse=True),
        "attention causal, ALiBi": lambda: attention(q, k, v, causal=True, alibi_slopes=slopes),
        "attention, mask_mod": lambda: attention(q, k, v, mask_mod=mask),
    }


def torch_calls(tensors: Tensors) -> dict[str, Timed]:
    like = tensors[0]
    found = {"torch.empty_like": Timed(lambda: lambda: torch.empty_like(like))}
    if like.is_cuda:
        from torch.nn.attention import SDPBackend

        q_heads, k_heads, v_heads = (x.transpose(1, 2).contiguous() for x in tensors)
        attend = torch.nn.functional.scaled_dot_product_attention
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            call = lambda: attend(q_heads, k_heads, v_heads, is_causal=True)  # noqa: E731
            found[f"sdpa {name}"] = Timed(lambda call=call: call, backend=backend)
    return found


def parts(tensors: Tensors) -> dict[str, Callable[[], Callable[[], object]]]:
    """The parts of a causal call, each made when its family's plan is there; in the order in which a call has them."""
    from flashsmith.runtime import attention as path

    q, k, v = tensors
    flags = (True, (-1, -1), 0.0, None, None)

    def plan() -> Any:
        for _ in range(WARM_UP):
            path.attention(q, k, v, causal=True)
        return path._recent.get(flags) or path._plans[path._key(q, k, v, flags)]

    def look_up() -> Callable[[], object]:
        recent, (causal, window_size, softcap, softmax_scale, captured) = path._recent, flags
        return lambda: recent.get((causal, window_size, softcap, softmax_scale, captured))

    def check() -> Callable[[], object]:
        is_alike = plan().check
        return lambda: is_alike(q, k, v)

    def allocation(of_lse: bool) -> Callable[[], object]:
        found = plan()
        empty = found.empty
        sizes, strides, dtype = found.out_shape, found.out_strides, found.dtype
        if of_lse:
            sizes, strides, dtype = found.lse_shape, found.lse_strides, torch.float32
        return lambda: empty(sizes, strides, dtype)

    def device_and_stream() -> Callable[[], object]:
        index, device, stream = plan().device_index, path._current_device, path._current_stream
        return lambda: (device(), stream(index))

    def launch(driver_alone: bool) -> Callable[[], object]:
        found = plan()
        out = torch.empty_like(q)
        stream = path._current_stream(found.device_index)
        addresses = [x.data_ptr() for x in (q, k, v, out)]
        found.launch(*addresses, 0, (), stream)
        enqueue, grid, threads, smem_bytes = found._launch, found._grid, found._threads, found._smem_bytes
        packed = found._free[0]
        if driver_alone:
            return lambda: enqueue(grid, threads, smem_bytes, stream, packed)
        of_q, of_k, of_v, of_out = addresses
        # `out` lives as long as its address is used.
        return lambda out=out: found.launch(of_q, of_k, of_v, of_out, 0, (), stream)  # pyright: ignore[reportReturnType]

    return {
        "look-up by flags": look_up,
        "check of q, k, v": check,
        "(look-up by all facts, after other tensors)": lambda: lambda: path._plans.get(path._key(q, k, v, flags)),
        "addresses of q, k, v": lambda: lambda: (q.data_ptr(), k.data_ptr(), v.data_ptr()),
        "device and stream": device_and_stream,
        "allocation of the output": lambda: allocation(False),
        "(allocation of the LSE)": lambda: allocation(True),
        "packing and launch": lambda: launch(False),
        "- of it, the driver's launch": lambda: launch(True),
    }


def measure(timed: dict[str, Timed], count: int, synchronise: Callable[[], None]) -> dict[str, float]:
    """Median microseconds a call, by name; a name that cannot run is left out."""
    usable = {}
    for name, one in timed.items():
        try:
            with one.context():
                one.make()()
            usable[name] = one
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    samples: dict[str, list[float]] = {name: [] for name in usable}
    for _ in range(ROUNDS):
        for name, one in usable.items():
            with one.context():
                call = one.make()
                for _ in range(WARM_UP):
                    call()
                calls = range(one.count or count)
                synchronise()
                started = time.perf_counter()
                for _ in calls:
                    call()
                samples[name].append((time.perf_counter() - started) / len(calls) * 1e6)
                synchronise()
    return {name: statistics.median(values) for name, values in samples.items()}


def report(device: str, count: int, synchronise: Callable[[], None]) -> dict[str, Any]:
    """`microseconds` of whole calls by name, another family's with its name behind; `parts` by family and name."""
    from flashsmith import attention
    from flashsmith.generator.errors import UnsupportedError
    from flashsmith.generator.families import FAMILIES
    from flashsmith.runtime.attention import last_plan, only_family

    tensors = inputs(device)
    attention(*tensors)
    used = last_plan()
    assert used is not None
    families = [used.family]
    for name in FAMILIES:
        try:
            with only_family(name):
                attention(*tensors)
        except UnsupportedError:
            continue
        families += [name] if name not in families else []
    timed = {"(an empty function)": Timed(lambda: lambda: None)}
    for family in families:
        behind = f" ({family})" if family != families[0] else ""
        calls = attention_calls(tensors).items()
        timed |= {name + behind: Timed(lambda call=call: call, family) for name, call in calls}
        for name, make in parts(tensors).items():
            timed[f"{family}: {name}"] = Timed(make, family, count=min(count, BURST))
    costs = measure(timed | torch_calls(tensors), count, synchronise)
    # A part is timed within a function of its own, a call within another.
    nothing = costs.pop("(an empty function)")
    of_parts = {
        family: {name: max(costs.pop(f"{family}: {name}") - nothing, 0.0) for name in parts(tensors)}
        for family in families
    }
    return {"family": families[0], "microseconds": costs, "parts": of_parts}


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within the block, calls take CPU tensors and launch nothing; the rest of their path is what it is on a GPU."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from helpers_attention import FakeBackend

    from flashsmith.runtime.attention import use_backend

    class Silent(FakeBackend):
        def make(self, spec, config, family):  # type: ignore[no-untyped-def]
            kernel = super().make(spec, config, family)
            kernel.launch = lambda *_: None  # type: ignore[method-assign]
            return kernel

    with use_backend(Silent()):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description="host cost of one eager call, in microseconds")
    parser.add_argument("--calls", type=int, default=1000, help="calls in a row")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fake", action="store_true", help="no GPU: CPU tensors, the launch left out")
    options = parser.parse_args()
    if options.fake:
        with torch.no_grad(), pretended_gpu():
            found = report("cpu", options.calls, lambda: None)
        machine = platform.processor() or platform.machine()
    else:
        if not torch.cuda.is_available():
            sys.exit("host_cost.py calls kernels on a GPU, and torch sees none: use --fake to leave the launch out.")
        with torch.no_grad():
            found = report("cuda", options.calls, torch.cuda.synchronize)
        machine = torch.cuda.get_device_name()
    if options.json:
        print(json.dumps({"machine": machine, "torch": torch.__version__, **found}, indent=2))
        return
    print(f"{machine}, torch {torch.__version__}: microseconds a call, median of {ROUNDS} rounds; {found['family']}")
    for name, cost in found["microseconds"].items():
        print(f"{name:50s} {cost:6.2f}")
    for family, costs in found["parts"].items():
        print(f"\nParts of a causal call, {family}")
        for name, cost in costs.items():
            print(f"{name:50s} {cost:6.2f}")


if __name__ == "__main__":
    main()
