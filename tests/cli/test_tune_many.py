"""`flashsmith tune` with lists of problems: how they are read, and one run on an invented GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers_campaign import ManyBench

from flashsmith.generator.errors import SpecError
from flashsmith.runtime import driver
from flashsmith.runtime.commands.tune_many import parse_head_dims, parse_masks
from flashsmith.runtime.tune import campaign

TUNE = "tune -d 64 -d 192/128 --masks none,causal --gqa 1,4 --seqlens 512,4k --jobs 2"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """An invented GPU and compiler; the benches that were made."""
    monkeypatch.delenv("FLASHSMITH_DEVICE")
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "driver_available", lambda: True)
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "device_info", lambda index: SimpleNamespace(name="Test GPU", cc=(9, 0)))
    made = []
    tune_many = campaign.tune_many

    def invented(requests, **options):
        made.append((requests, options))
        return tune_many(
            requests, bench=ManyBench(), compile_handler="helpers_campaign:compile_any_handler", **options
        )  # fmt: skip

    monkeypatch.setattr(campaign, "tune_many", invented)
    return made


def test_one_run_tunes_every_combination(as_json, gpu, tmp_path):
    data = as_json(f"{TUNE} --out {tmp_path / 'out'}")
    assert len(data["buckets"]) == 2 * 2 * 2 * 2
    problems = {bucket["problem"].split(" mask")[0] for bucket in data["buckets"]}
    assert problems == {"forward bf16 d64", "forward bf16 d192/128"}
    heads = {(b["bucket"]["nheads"], b["bucket"]["nheads_k"]) for b in data["buckets"]}
    assert heads == {(32, 32), (32, 8), (10, 10), (8, 2)}
    assert data["paths"] == [str(tmp_path / "out" / "sm_90" / "test-gpu" / "forward_sm90.yaml")]
    assert data["unreached"] == data["failed"] == []
    (requests, options), = gpu  # fmt: skip
    assert options["budget_s"] == 80.0 and options["explore"] == campaign.EXPLORE
    assert [request.problem.causal for request in requests] == [False, True, False, True]


def test_the_table_and_then_show_say_why(cli, gpu, tmp_path, monkeypatch):
    code, out, _ = cli(f"{TUNE} --trials 12 --budget 50")
    assert code == 0
    assert "16 winners" in out and "kernels compiled" in out and "Written:" in out
    assert "bf16 d192/128 causal" in out
    assert gpu[0][1] == {"budget_s": 50.0, "explore": 12, "progress": None}
    out = cli("show --why -d 64")[1]
    assert out.count("runner-up") >= 8 and "waves" in out
    assert "why     " in cli("show --call -d 64 --causal --seqlen 4k --arch sm_90 --gpu 'Test GPU'")[1]


def test_what_the_budget_left_out_is_said(cli, gpu):
    code, out, _ = cli(f"{TUNE} --budget 0.001")
    assert code == 0
    assert "Not reached within --budget: " in out and "The same command goes on" in out


def test_a_failed_bucket_is_said_and_the_exit_code_is_one(cli, gpu, monkeypatch):
    def of(self, request, family):
        causal = request.problem.causal
        return ManyBench(wrong=lambda config: causal, shared=self, spec=request.problem.traced().spec)

    monkeypatch.setattr(ManyBench, "of", of)
    code, out, _ = cli("tune -d 64 --masks none,causal --seqlens 512,4k --jobs 2")
    assert code == 1
    assert "Failed:  forward bf16 d64 causal" in out and "2 winners" in out


def test_one_problem_and_ratio_take_the_old_road(cli, gpu, monkeypatch):
    from flashsmith.generator.errors import TuneError
    from flashsmith.runtime.tune import study

    def refuse(request, *, progress):
        raise TuneError(f"alone: {request.problem.head_dim} {request.shapes[0]}")

    monkeypatch.setattr(study, "tune", refuse)
    assert "alone: 64 B4 N4096 H32" in cli("tune -d 64")[2]
    assert "alone: 64 B4 N4096 H32/8" in cli("tune -d 64 --gqa 4")[2]
    assert not gpu


def test_many_predictions_are_made_one_after_another(as_json, tmp_path):
    pytest.importorskip("cupy")
    data = as_json("tune -d 64 --masks none,causal --seqlens 1k --arch sm_80 --max-compile 4 --prove 0 --jobs 1")
    assert [run["status"] for run in data["runs"]] == ["predicted", "predicted"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("none", ((False, ""),)),
        ("causal,none,causal", ((True, ""), (False, ""))),
        ("window:1024,0,causal", ((False, "1024,0"), (True, ""))),
        ("none,window:1k,-1,window:-1,64", ((False, ""), (False, "1k,-1"), (False, "-1,64"))),
    ],
)
def test_a_list_of_masks(text, found):
    assert parse_masks(text) == found


@pytest.mark.parametrize("text", ["", "full", "causal,", "window:5", "window:a,0", "none causal", "causal,,none"])
def test_what_is_no_list_of_masks(text):
    with pytest.raises(SpecError, match=r"--masks|--window"):
        parse_masks(text)


def test_a_list_of_head_dims():
    assert parse_head_dims(["64,96", "192/128", "64"]) == ((64, 0), (96, 0), (192, 128))
    assert parse_head_dims(["64,192/128"], head_dim_v=32) == ((64, 32), (192, 128))
    for text in ("64,", "a", "64/", "-64", "192/128/64"):
        with pytest.raises(SpecError, match="--head-dim"):
            parse_head_dims([text])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tune --masks causal,none --causal", "--masks and --causal both name masks"),
        ("tune --masks none,causal --window 64,0", "--masks and --window both name masks"),
        ("tune --gqa 4 --nheads-k 2", "--gqa and --nheads-k state the same"),
        ("tune --gqa 4 --nheads 6", "--nheads must be a multiple of each ratio"),
        ("tune --gqa 0", "must be positive"),
        ("tune -d 64,banana", "--head-dim takes numbers"),
        ("tune -d 63,64", "multiple"),
    ],
)
def test_usage_errors(cli, line, words):
    code, _, err = cli(line)
    assert code == 2 and words in err


def test_an_exhaustive_run_takes_one_problem(cli, gpu):
    code, _, err = cli("tune -d 64,128 --exhaustive")
    assert code == 2 and "--exhaustive times one problem" in err
