"""The host cost of one eager call from Python, with everything cached: flashsmith.attention beside torch's SDPA.

    python benchmarks/host_cost.py [--json] [--calls 2000]

The tensors are so small that the GPU is done before the next call is made: what is measured is Python, the allocations
and the launch. Each number is the median over rounds of the mean cost of `--calls` calls in a row, in microseconds;
rounds of all callables take turns. Without a GPU, `--fake` leaves the launch out and uses CPU tensors.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

ROUNDS = 15


def callables(device: str) -> dict[str, Callable[[], object]]:
    import flashsmith

    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 128, 4, 64, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3))
    slopes = torch.full((4,), 0.1, device=device)
    window = 32

    def mask(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < window

    found: dict[str, Callable[[], object]] = {
        "attention": lambda: flashsmith.attention(q, k, v),
        "attention causal": lambda: flashsmith.attention(q, k, v, causal=True),
        "attention causal, LSE": lambda: flashsmith.attention(q, k, v, causal=True, return_lse=True),
        "attention causal, ALiBi": lambda: flashsmith.attention(q, k, v, causal=True, alibi_slopes=slopes),
        "attention, mask_mod": lambda: flashsmith.attention(q, k, v, mask_mod=mask),
        "torch.empty_like": lambda: torch.empty_like(q),
    }
    if device == "cuda":
        from torch.nn.attention import SDPBackend

        q_heads, k_heads, v_heads = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            found[f"sdpa {name}"] = _within(backend, lambda: attend(q_heads, k_heads, v_heads, is_causal=True))
    return found


def _within(backend: object, call: Callable[[], object]) -> Callable[[], object]:
    """`call` marked with the back end it is timed in: entering the choice is no part of the cost."""
    call.backend = backend  # type: ignore[attr-defined]
    return call


def _context(call: Callable[[], object]) -> AbstractContextManager[object]:
    backend = getattr(call, "backend", None)
    if backend is None:
        return nullcontext()
    from torch.nn.attention import sdpa_kernel

    return sdpa_kernel([backend])


def measure(calls: dict[str, Callable[[], object]], count: int, synchronise: Callable[[], None]) -> dict[str, float]:
    """Median microseconds a call, by name; a name that cannot run is left out."""
    usable = {}
    for name, call in calls.items():
        try:
            with _context(call):
                for _ in range(20):
                    call()
            usable[name] = call
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
    samples: dict[str, list[float]] = {name: [] for name in usable}
    for _ in range(ROUNDS):
        for name, call in usable.items():
            with _context(call):
                synchronise()
                started = time.perf_counter()
                for _ in range(count):
                    call()
                samples[name].append((time.perf_counter() - started) / count * 1e6)
                synchronise()
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="host cost of one eager call, in microseconds")
    parser.add_argument("--calls", type=int, default=2000, help="calls in a row")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fake", action="store_true", help="no GPU: CPU tensors, the launch left out")
    options = parser.parse_args()
    if options.fake:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from helpers_attention import FakeBackend

        from flashsmith.runtime.attention import use_backend

        class Silent(FakeBackend):
            def make(self, spec, config, family):  # type: ignore[no-untyped-def]
                kernel = super().make(spec, config, family)
                kernel.launch = lambda *_: None  # type: ignore[method-assign]
                return kernel

        with torch.no_grad(), use_backend(Silent()):
            costs = measure(callables("cpu"), options.calls, lambda: None)
        machine = platform.processor() or platform.machine()
    else:
        if not torch.cuda.is_available():
            sys.exit("host_cost.py calls kernels on a GPU, and torch sees none: use --fake to leave the launch out.")
        with torch.no_grad():
            costs = measure(callables("cuda"), options.calls, torch.cuda.synchronize)
        machine = torch.cuda.get_device_name()
    if options.json:
        print(json.dumps({"machine": machine, "torch": torch.__version__, "microseconds": costs}, indent=2))
        return
    print(f"{machine}, torch {torch.__version__}: microseconds a call, median of {ROUNDS} rounds")
    for name, cost in costs.items():
        print(f"{name:28s} {cost:6.2f}")


if __name__ == "__main__":
    main()
