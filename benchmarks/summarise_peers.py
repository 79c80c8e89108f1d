"""A benchmark harness's rows as a Markdown table: times of each provider, and flashsmith's ratio to each, case by case.

    python benchmarks/summarise_peers.py OUT [--rows FILE] [--against sdpa-cudnn,fa3] > TABLE.md

OUT is the folder that the harness of `flashsmith_provider.py` wrote `peers.jsonl` to, or such a file, also one of
`benchmarks/results`. Each suite has a table: TFLOP/s as the harness counts them for fwd, bwd and gqa, microseconds for
the rest. A ratio is the peer's time over flashsmith's: above 1 flashsmith is faster. "best" is the fastest peer of the
row. Geometric means are over the rows where both have a time; a provider that was wrong or failed stands in its cell
with that word. `--rows` writes the timed rows alone, as in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "flashsmith"
SUITES = ("fwd", "bwd", "gqa", "decode", "short")
TITLES = {
    "fwd": "Forward, TFLOP/s", "bwd": "Backward, TFLOP/s", "gqa": "Grouped-query attention, TFLOP/s",
    "decode": "Decoding, us", "short": "Short sequences, us",
}  # fmt: skip
#: What `--rows` leaves out of a row: words of the harness about itself.
NOT_KEPT = ("kind", "id", "prio", "layout", "status", "nsets", "set_bytes", "wall_s", "spot_err")
SILENT = ("skip", "absent")


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One case. The order is that of the tables: head dim, full before causal, longest first."""

    suite: str
    dtype: str
    d: int
    causal: bool
    chunked: bool
    shorter: int
    B: int
    H: int
    Hk: int
    N: int
    M: int
    layout: str

    def __str__(self) -> str:
        keys = f" M{self.M}" if self.M != self.N else ""
        heads = f"H{self.H}" + (f"/{self.Hk}" if self.Hk != self.H else "")
        words = [f"d{self.d}", "causal" if self.causal else "full", f"B{self.B}", f"N{self.N}{keys}", heads]
        words += [self.layout] if self.layout != "contig" else []
        return " ".join(words + ([self.dtype] if self.dtype != "bf16" else []))


@dataclass
class Results:
    """`rows` by case and provider, the last one where a cell was run twice; `peers` in the order in which they came."""

    rows: dict[Case, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        found = dict.fromkeys(name for of_case in self.rows.values() for name in of_case)
        return [name for name in found if name != OURS]


def read(lines: Iterable[str]) -> Results:
    """What the harness wrote, a JSON object a line. Raises ValueError for other text."""
    results = Results()
    for line in filter(None, map(str.strip, lines)):
        row = json.loads(line)
        kind = row.get("kind", "result")
        if kind == "system" and row.get("when") == "start" and "gpu" in row:
            results.facts += [_machine(row)]
        elif kind == "provider" and row.get("ok"):
            results.facts += [f"{row['provider']}: {row['version']}."]
        elif kind == "result" and row.get("status") not in SILENT:
            results.rows.setdefault(_case(row), {})[row["provider"]] = row
    return results


def _machine(row: Mapping[str, Any]) -> str:
    fields = [name.strip() for name in str(row.get("smi_fields", "")).split(",")]
    load = dict(zip(fields, [value.strip() for value in str(row.get("smi_load", "")).split(",")], strict=False))
    return (
        f"{row['gpu']} ({row.get('sms')} SMs), driver {load.get('driver_version', '?')}, torch {row.get('torch')}, CUDA"
        f" {row.get('cuda')}, cuDNN {row.get('cudnn')}, Python {row.get('python')}; SM clock under load"
        f" {load.get('clocks.sm', '?')} MHz, bf16 8192^3 matrix product {row.get('mm_tflops')} TFLOP/s, copy"
        f" {row.get('copy_gbs')} GB/s."
    )


def _case(row: Mapping[str, Any]) -> Case:
    suite = row.get("suite") or ("gqa" if row["H"] != row["Hk"] else "fwd")
    return Case(
        suite=suite, dtype=row["dtype"], d=row["d"], causal=row["causal"], chunked=row["N"] != row["M"],
        shorter=-row["N"], B=row["B"], H=row["H"], Hk=row["Hk"], N=row["N"], M=row["M"],
        layout=row.get("layout", "contig"),
    )  # fmt: skip


def time_of(row: Mapping[str, Any] | None) -> float:
    """Milliseconds, NaN where the provider has no right result."""
    return float(row["ms"]) if row is not None and row.get("status", "ok") == "ok" else math.nan


def ratios_of(of_case: Mapping[str, Mapping[str, Any]], peers: Sequence[str]) -> dict[str, float]:
    """The peer's time over flashsmith's by peer, and "best" for the fastest one; NaN where a time is missing."""
    ours = time_of(of_case.get(OURS))
    times = {name: time_of(of_case.get(name)) for name in peers}
    best = min((time for time in times.values() if not math.isnan(time)), default=math.nan)
    return {name: time / ours for name, time in {**times, "best": best}.items()}


def geometric_mean(ratios: Iterable[float]) -> float:
    """Over those that are no NaN; NaN where none is left."""
    logs = [math.log(ratio) for ratio in ratios if not math.isnan(ratio)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary(name: str, ratios: Sequence[float]) -> str:
    """Geometric mean, lowest and highest of the ratios to `name`, in words."""
    there = [ratio for ratio in ratios if not math.isnan(ratio)]
    if not there:
        return f"no case with both times for {name}"
    peer = "the best peer of each case" if name == "best" else name
    return (
        f"{geometric_mean(there):.3f} of {peer} ({len(there)} cases, lowest {min(there):.3f}, highest {max(there):.3f})"
    )


def table(results: Results, suite: str, against: Sequence[str]) -> list[str]:
    """The lines of a suite's table and of its means; none where the suite has no rows."""
    cases = sorted(case for case in results.rows if case.suite == suite)
    peers = [name for name in against if any(name in results.rows[case] for case in cases)]
    if not cases or not peers:
        return []
    compared = [*peers, "best"] if len(peers) > 1 else peers
    columns = ["case", OURS, *peers, *(f"/ {name}" for name in compared)]
    lines = [f"## {TITLES[suite]}", "", _line(columns), "|" + "---|" * len(columns)]
    ratios = {case: ratios_of(results.rows[case], peers) for case in cases}
    for case in cases:
        cells = [_cell(results.rows[case].get(name), suite) for name in (OURS, *peers)]
        lines.append(_line([str(case), *cells, *(_number(ratios[case][name]) for name in compared)]))
    lines += ["", f"Geometric means over all: {_means(ratios, cases, compared)}.", ""]
    groups: dict[str, list[Case]] = {}
    for case in cases:
        group = f"{'chunked prefill ' if case.chunked and suite == 'gqa' else ''}d{case.d}"
        groups.setdefault(f"{group} {'causal' if case.causal else 'full'}", []).append(case)
    if len(groups) > 1:
        lines += [f"- {name}: {_means(ratios, group, compared)}" for name, group in groups.items()]
    return [*lines, ""] if lines[-1] else lines


def _means(ratios: Mapping[Case, Mapping[str, float]], cases: Sequence[Case], compared: Sequence[str]) -> str:
    return "; ".join(summary(name, [ratios[case][name] for case in cases]) for name in compared)


def _cell(row: Mapping[str, Any] | None, suite: str) -> str:
    if row is None:
        return "-"
    if row.get("status", "ok") != "ok":
        return str(row["status"])
    return f"{row['ms'] * 1e3:.1f}" if suite in ("decode", "short") else f"{row['tflops']:.0f}"


def _number(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.3f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def kept_rows(results: Results) -> list[str]:
    """The timed rows as lines of JSON, in the tables' order of cases."""
    return [
        json.dumps({name: x for name, x in row.items() if name not in NOT_KEPT and (name, x) != ("suite", "fwd")})
        for case in sorted(results.rows, key=lambda case: (SUITES.index(case.suite), case))
        for row in results.rows[case].values()
        if not math.isnan(time_of(row))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="a Markdown table of a benchmark harness's rows")
    parser.add_argument("path", type=Path, help="the harness's output folder, or a file of rows")
    parser.add_argument("--against", default="", help="the peers, in this order, with commas; all by default")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write the timed rows there, a JSON object a line")
    options = parser.parse_args()
    path = options.path / "peers.jsonl" if options.path.is_dir() else options.path
    try:
        results = read(path.read_text().splitlines())
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{path} must hold the harness's rows, a JSON object a line, but reading it gave: {error!r}.")
    peers = [name for name in options.against.split(",") if name] or results.peers
    unknown = set(peers) - set(results.peers)
    if unknown:
        sys.exit(f"--against names {', '.join(sorted(unknown))}, but {path} has rows of {', '.join(results.peers)}.")
    lines = [*results.facts, ""] if results.facts else []
    for suite in SUITES:
        lines += table(results, suite, peers)
    print("\n".join(lines).rstrip())
    if options.rows is not None:
        options.rows.write_text("".join(f"{line}\n" for line in kept_rows(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
