"""flashsmith as a provider of a benchmark harness that compares attention libraries case by case.

The harness, `peers_bench`, is a program of its own and no part of flashsmith: this file does nothing by itself and is
imported only there, with `python3 peers_bench.py --plugin flashsmith_provider.py --providers flashsmith,sdpa-flash`.
Each group of providers has a process of its own. In it the harness calls `load` once (the version for its report), then for
each case that a provider `supports` `build`, the function that `build` gave, and `done`. The harness checks outputs and
measures times. `flashsmith bench` compares with torch alone and needs no harness.

A case is a dictionary (suite, B, N, M, H, Hk, d, causal, layout, dtype): batch, rows of Q, rows of K, heads of Q and K,
head dim. Its inputs are sets `data.q[i]`, `data.k[i]`, `data.v[i]` of (batch, seqlen, nheads, head_dim).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import peers_bench as pb  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]


class Flashsmith(pb.Provider):  # type: ignore[misc]
    """Forward attention of dense tensors, with the tuned configs of this machine."""

    name = group = "flashsmith"
    layout = "bshd"
    suites = ("fwd", "gqa", "short")
    dtypes = ("bf16", "fp16")

    def load(self) -> str:
        import flashsmith

        self.attention = flashsmith.attention
        return flashsmith.__version__

    def supports(self, c: dict[str, Any]) -> str | None:
        """Why the case cannot be run, or None."""
        reason: str | None = pb.Provider.supports(self, c)
        if reason is None and c["layout"] != "contig":
            return "no paged KV"
        return reason

    def build(self, c: dict[str, Any], data: Any) -> Callable[[int], Any]:
        """f(i): the output for input set i. `causal` is bottom-right aligned, as the harness's reference is."""
        q, k, v, attention, causal = data.q, data.k, data.v, self.attention, c["causal"]
        return lambda i: attention(q[i], k[i], v[i], causal=causal)

    def done(self) -> None:
        """Says which config the case used, for the harness's log."""
        from flashsmith.runtime.attention import last_plan

        print(f"flashsmith: {last_plan()}", file=sys.stderr)


PROVIDERS = [Flashsmith]
