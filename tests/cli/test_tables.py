"""Tables: short names, widths, groups, and what they say of records that cannot be used."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from helpers_tune import ARCH, DEFAULT, SHAPE, SPACE, record

from flashsmith.generator.families import FAMILIES
from flashsmith.generator.language import trace_mask
from flashsmith.generator.spec import AttentionSpec
from flashsmith.runtime import store
from flashsmith.runtime.commands.naming import MAX_EXPRESSION, short_config, short_problem
from flashsmith.runtime.problem import problem_of
from flashsmith.runtime.store import save_records


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({}, "bf16 d64"),
        ({"causal": True}, "bf16 d64 causal"),
        ({"window_size": (128, 0)}, "bf16 d64 window(128,0)"),
        ({"window_size": (128, 64)}, "bf16 d64 window(128,64)"),
        ({"window_size": (-1, 64)}, "bf16 d64 window(-1,64)"),
        ({"window_size": (7, -1), "softcap": 30.0}, "bf16 d64 window(7,-1) softcap(30)"),
        ({"causal": True, "softcap": 2.5}, "bf16 d64 causal softcap(2.5)"),
    ],
)
def test_what_the_options_make_has_a_name(flags, name):
    problem = problem_of(dtype="bf16", head_dim=64, **flags)
    values = {}
    for traced in filter(None, (problem.mask, problem.score)):
        values.update(zip((slot.name for slot in traced.graph.scalars), traced.scalars, strict=True))
    assert short_problem(str(problem.spec), values, op=False) == name


def test_other_masks_are_cut():
    graph = trace_mask(lambda b, h, q_idx, kv_idx: ((kv_idx % 7 == 3) | (q_idx % 5 == 2)) & (q_idx + 9 > kv_idx)).graph
    words = short_problem(str(AttentionSpec(head_dim=64, mask=graph)), op=False)
    assert words.startswith("bf16 d64 mask[") and words.endswith("...]")
    assert len(words) == len("bf16 d64 mask[]") + MAX_EXPRESSION


def test_configs_are_told_apart_in_a_few_characters():
    for name, dims in (("forward_sm80", 64), ("forward_sm90", 128)):
        mask = problem_of(dtype="bf16", head_dim=64, causal=True).spec.mask
        space = FAMILIES[name].space(AttentionSpec(head_dim=dims, mask=mask), ARCH)
        short = {short_config(config.to_dict()) for config in space}
        assert len(short) == len(space)
        assert max(map(len, short)) <= 36
    assert short_config(DEFAULT.to_dict()) == "128x48 w4 s2 opt linear b3"


@pytest.mark.parametrize("columns", ["100", "120"])
def test_tables_fit_the_columns_there_are(cli, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    out = cli("show")[1]
    assert max(map(len, out.splitlines())) <= int(columns)
    rows = [line for line in out.splitlines() if line.startswith(" bf16")]
    assert len(rows) >= 30 and all("measured" in row and " b" in row for row in rows)
    assert "..." not in out


def test_columns_bound_a_piped_table(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, cli("show")[1].splitlines())) <= 60


def test_show_marks_what_no_call_can_use(cli, as_json, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "PACKAGED", tmp_path / "none")
    negative = {**DEFAULT.to_dict(), "B_r": -16}
    huge = {**DEFAULT.to_dict(), "B_c": 4096}
    records = [replace(record(), config=negative), record(SPACE[5], shape=replace(SHAPE, batch=5))]
    records.append(replace(record(shape=replace(SHAPE, batch=6)), config=huge))
    path = save_records(records, arch="sm_90", family="forward_sm80")
    reasons = [r["invalid"] for r in as_json("show")["records"]]
    assert reasons[1] is None
    assert "multiple of 16, but got -16" in reasons[0] and "shared memory" in reasons[2]
    out = cli("show")[1]
    assert out.count("INVALID: ") == 2 and "but got -16" in out
    os.remove(path)
    os.mkfifo(path)
    code, out, err = cli("show")
    assert code == 0 and "No tuned configs" in out and "no regular file" in err


def test_the_cache_is_listed_in_groups(cli, monkeypatch, tmp_path):
    pytest.importorskip("cupy")
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    for config in ("B_c=32", "B_c=48"):
        assert cli(f"compile -d 64 --causal --arch sm_80 --default --set {config}")[0] == 0
    rows = [line.split() for line in cli("cache")[1].splitlines() if "bf16 d64 causal" in line]
    assert len(rows) == 1 and rows[0][:6] == ["forward_sm80", "sm_80", "bf16", "d64", "causal", "2"]
    assert cli("cache --all")[1].count("bf16 d64 causal") == 2
    pruned = cli("cache --prune 1G")[1]
    assert "Removed 0 kernels" in pruned and "2 kernels, " in pruned and "causal" not in pruned


def test_compile_says_where_the_cubin_is(cli, as_json, monkeypatch, tmp_path):
    pytest.importorskip("cupy")
    good, bad = tmp_path / "good", tmp_path / "file" / "cache"
    bad.parent.write_text("")
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(good))
    data = as_json("compile -d 64 --arch sm_80")
    assert os.path.isdir(data["folder"])
    assert data["report"]["static_smem_bytes"] == 0 < data["dynamic_smem_bytes"]
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(bad))
    assert as_json("compile -d 64 --arch sm_80")["folder"] is None
    assert "bytes in memory only" in cli("compile -d 64 --arch sm_80")[1]


def test_tune_says_kept_where_nothing_was_written(cli, as_json):
    pytest.importorskip("cupy")
    line = "tune -d 64 --seqlens 1k --arch sm_80 --prove 0 --jobs 1"
    assert "Written:" in cli(f"{line} --max-compile 6")[1]
    out = cli(f"{line} --max-compile 4")[1]
    assert "Written:" not in out and "Kept:    the predicted record" in out and "best of 6 compiled" in out
    assert len(as_json(f"{line} --max-compile 4")["kept"]) == 1
    assert "Written:" in cli(f"{line} --max-compile 4 --fresh")[1]
