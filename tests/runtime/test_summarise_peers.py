"""benchmarks/summarise_peers.py: from the harness's rows to tables, ratios and means."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys

import pytest

RESULTS = "benchmarks/results/h200_forward_sm90.jsonl"


@pytest.fixture
def script(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "benchmarks"))
    return importlib.import_module("summarise_peers")


def row(provider, ms, *, suite="fwd", status="ok", **case):
    sizes = {"B": 1, "N": 1024, "M": 1024, "H": 8, "Hk": 8, "d": 128, "causal": False, "layout": "contig"}
    facts = {"kind": "result", "provider": provider, "suite": suite, "dtype": "bf16", "status": status}
    return json.dumps({**facts, **sizes, **case, **({"ms": ms, "tflops": 100 / ms} if status == "ok" else {})})


ROWS = [
    row("flashsmith", 1.0), row("cudnn", 2.0), row("fa3", 1.25),
    row("flashsmith", 2.0, causal=True), row("cudnn", 1.0, causal=True), row("fa3", None, causal=True, status="wrong"),
    row("flashsmith", 1.0, suite="gqa", H=32, N=128, M=4096), row("fa3", 3.0, suite="gqa", H=32, N=128, M=4096),
    row("cudnn", None, suite="gqa", H=32, N=128, M=4096, status="skip"),
    row("flashsmith", 0.01, suite="short", N=16, M=16), row("cudnn", 0.02, suite="short", N=16, M=16),
]  # fmt: skip


def test_ratios_are_the_peers_time_over_ours(script):
    results = script.read(ROWS)
    of_full = next(rows for case, rows in results.rows.items() if case.suite == "fwd" and not case.causal)
    assert script.ratios_of(of_full, ["cudnn", "fa3"]) == {"cudnn": 2.0, "fa3": 1.25, "best": 1.25}
    of_causal = next(rows for case, rows in results.rows.items() if case.suite == "fwd" and case.causal)
    ratios = script.ratios_of(of_causal, ["cudnn", "fa3"])
    assert ratios["best"] == 0.5 and math.isnan(ratios["fa3"])


def test_a_table_of_each_suite(script):
    results = script.read(ROWS)
    peers = results.peers
    assert peers == ["cudnn", "fa3"]
    lines = script.table(results, "fwd", peers)
    assert "| d128 full B1 N1024 H8 | 100 | 50 | 80 | 2.000 | 1.250 | 1.250 |" in lines
    assert "| d128 causal B1 N1024 H8 | 50 | 100 | wrong | 0.500 | - | 0.500 |" in lines
    (means,) = [line for line in lines if line.startswith("Geometric means")]
    assert "1.000 of cudnn (2 cases, lowest 0.500, highest 2.000)" in means
    assert "1.250 of fa3 (1 cases" in means and f"{math.sqrt(1.25 * 0.5):.3f} of the best peer" in means
    # A peer that runs none of a suite has no column there, and the best of one is that one.
    gqa = script.table(results, "gqa", peers)
    assert gqa[2] == "| case | flashsmith | fa3 | / fa3 |"
    assert "| d128 full B1 N128 M4096 H32/8 | 100 | 33 | 3.000 |" in gqa
    assert "| d128 full B1 N16 H8 | 10.0 | 20.0 | 2.000 |" in script.table(results, "short", peers)
    assert script.table(results, "bwd", peers) == []


def test_the_last_row_of_a_cell_counts(script):
    results = script.read([*ROWS, row("flashsmith", 4.0)])
    ratios = [script.ratios_of(rows, ["cudnn"])["cudnn"] for case, rows in results.rows.items() if case.N == 1024]
    assert ratios[0] == 0.5


def test_the_committed_rows_give_the_committed_means(repo_root, tmp_path):
    file = tmp_path / "rows.jsonl"
    script = repo_root / "benchmarks" / "summarise_peers.py"
    command = [sys.executable, script, repo_root / RESULTS, "--rows", file]
    printed = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, timeout=60).stdout
    assert "1.184 of sdpa-cudnn (36 cases, lowest 1.005" in printed
    assert "1.129 of fa3 (36 cases, lowest 0.953" in printed
    assert "1.098 of the best peer of each case (36 cases, lowest 0.953" in printed
    # Every row and mean of the committed tables is what the committed rows give.
    tables = (repo_root / RESULTS).with_suffix(".md").read_text()
    said = [line for line in printed.splitlines() if line.startswith(("| d", "Geometric means", "- d", "- chunked"))]
    assert len(said) > 50 and all(line in tables for line in said)
    assert sorted(file.read_text().splitlines()) == sorted((repo_root / RESULTS).read_text().splitlines())


def test_rows_survive_being_kept(script):
    results = script.read(ROWS)
    again = script.read(script.kept_rows(results))
    timed = {case for case, rows in results.rows.items()}
    assert set(again.rows) == timed
    assert all("wrong" not in line for line in script.kept_rows(results))


def test_the_machine_comes_from_the_harness(script):
    system = {
        "kind": "system", "when": "start", "gpu": "NVIDIA H200", "sms": 132, "torch": "2.11.0", "cuda": "13.0",
        "cudnn": 91900, "python": "3.12.3", "mm_tflops": 671.4, "copy_gbs": 4298.8,
        "smi_fields": "driver_version,clocks.sm", "smi_load": "580.159.04, 1500",
    }  # fmt: skip
    provider = {"kind": "provider", "provider": "fa3", "ok": True, "version": "fa3_fwd.so"}
    facts = script.read([json.dumps(system), json.dumps(provider), json.dumps({**system, "when": "end"})]).facts
    assert len(facts) == 2 and facts[1] == "fa3: fa3_fwd.so."
    assert "NVIDIA H200 (132 SMs), driver 580.159.04" in facts[0] and "1500 MHz" in facts[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["absent.jsonl"], "absent.jsonl must hold"), ([RESULTS, "--against", "fa3,fa9"], "names fa9, but")],
)
def test_what_cannot_be_read_is_told(script, repo_root, monkeypatch, arguments, words):
    monkeypatch.chdir(repo_root)
    monkeypatch.setattr(sys, "argv", ["summarise_peers.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert words in str(caught.value)
