from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from helpers_tune import SHAPE, SPACE, record

from flashsmith.generator.errors import StoreError
from flashsmith.runtime import store_files
from flashsmith.runtime.store_files import gpu_slug, save_records, tuned_path
from flashsmith.runtime.store_reading import forget, read_file
from flashsmith.runtime.store_schema import record_from_dict
from flashsmith.runtime.store_yaml import parse_yaml

PLACE = {"arch": "sm_90", "family": "forward_sm80", "gpu": "NVIDIA H200"}


@pytest.fixture(autouse=True)
def clean_slate(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def write(tmp_path, change=lambda data: data, *, raw=None):
    """A saved file whose plain data went through `change`."""
    path = save_records([record()], root=tmp_path, **PLACE)
    if raw is None:
        data = yaml.safe_load(path.read_text())
        data = change(data) or data
        raw = yaml.safe_dump(data).encode()
    path.write_bytes(raw)
    forget()
    return path


def test_a_record_round_trips_through_yaml(tmp_path):
    path = save_records([record()], root=tmp_path, **PLACE)
    assert path == tmp_path / "sm_90" / "nvidia-h200" / "forward_sm80.yaml"
    assert read_file(path).records == (record(),)
    assert read_file(path).problems == ()


def test_optional_parts_may_be_missing(tmp_path):
    bare = record(values=None, baseline=None, ties=(), tie_rule="", runner_up=None, why="")
    assert read_file(save_records([bare], root=tmp_path, **PLACE)).records == (bare,)


def test_other_records_are_kept_and_equal_keys_replaced(tmp_path):
    longer = replace(SHAPE, seqlen_q=8192, seqlen_k=8192)
    save_records([record(), record(shape=longer)], root=tmp_path, **PLACE)
    path = save_records([record(SPACE[5])], root=tmp_path, **PLACE)
    kept = read_file(path).records
    assert [r.bucket for r in kept] == [SHAPE, longer]
    assert kept[0].config == SPACE[5].to_dict()


def test_a_prediction_does_not_replace_a_measurement(tmp_path, caplog):
    save_records([record()], root=tmp_path, **PLACE)
    path = save_records([record(SPACE[5], status="predicted")], root=tmp_path, **PLACE)
    assert read_file(path).records == (record(),)
    assert "Kept the measured record" in caplog.text
    path = save_records([record(SPACE[5])], root=tmp_path, **PLACE)
    assert read_file(path).records[0].config == SPACE[5].to_dict()


def test_the_file_is_for_people(tmp_path):
    text = save_records([record()], root=tmp_path, **PLACE).read_text()
    assert text.startswith("# flashsmith: tuned configs of forward_sm80 on nvidia-h200 (sm_90).")
    assert "  config: {B_r: 128, B_c: 48" in text
    assert max(map(len, text.splitlines())) <= 150
    assert "  device: {name: Test GPU, cc: '9.0', sm_count: 132" in text


def test_equal_records_give_equal_bytes(tmp_path):
    pair = [record(), record(shape=replace(SHAPE, batch=1))]
    first = save_records(pair, root=tmp_path / "a", **PLACE).read_bytes()
    assert first == save_records(reversed(pair), root=tmp_path / "b", **PLACE).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema=2), "schema must be 1"),
        (lambda d: d.update(schema="1"), "schema must be 1"),
        (lambda d: d.update(schema=True), "schema must be 1"),
        (lambda d: d.pop("schema") and None, "schema must be 1"),
        (lambda d: d.update(extra=1), "unknown keys: extra"),
        (lambda d: d.update(family="other"), "must be those of the path"),
        (lambda d: d.update(arch="sm_80"), "must be those of the path"),
        (lambda d: d.update(records={}), "records must be a list"),
        (lambda d: [1], "must be a map"),
    ],
)
def test_a_wrong_file_is_ignored_with_one_warning(tmp_path, caplog, change, words):
    path = write(tmp_path, change)
    assert read_file(path).records == ()
    assert read_file(path).records == ()
    assert not read_file(path).usable
    assert words in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("config"), "lacks the key 'config'"),
        (lambda r: r.update(surprise=1), "unknown keys: surprise"),
        (lambda r: r.update(status="guessed"), "status must be one of"),
        (lambda r: r.update(config=[]), "config must be a map"),
        (lambda r: r["config"].update(B_r=1.5), "B_r must be an integer, boolean or string"),
        (lambda r: r["config"].update(B_r=None), "B_r must be an integer, boolean or string"),
        (lambda r: r["bucket"].update(batch=-1), "batch must be an integer >= 0"),
        (lambda r: r["bucket"].update(batch="4"), "batch must be an integer >= 0"),
        (lambda r: r["bucket"].update(more=1), "bucket"),
        (lambda r: r.update(bucket=3), "bucket must be a map"),
        (lambda r: r["time"].update(median_ms=0), "median_ms must be a number > 0"),
        (lambda r: r["time"].update(median_ms="1"), "median_ms must be a number > 0"),
        (lambda r: r["time"].update(n=True), "n must be an integer"),
        (lambda r: r["class"].update(head_dim=-16), "head_dim must be an integer >= 1"),
        (lambda r: r["class"].update(mask=7), "mask must be a string"),
        (lambda r: r["device"].update(cc=[9]), "cc must be a string"),
        (lambda r: r["device"].update(cc="9"), "cc must be two numbers"),
        (lambda r: r.update(ties=5), "ties must be a list"),
        (lambda r: r.update(values=[1]), "values must be a map of numbers"),
        (lambda r: r.update(baseline={"name": "x"}), "lacks the key 'median_ms'"),
        (lambda r: r.update(runner_up={"config": {}, "median_ms": 1.0}), "runner_up must be a map of choices"),
        (lambda r: r["runner_up"].pop("median_ms"), "lacks the key 'median_ms'"),
        (lambda r: r.update(why=["waves"]), "why must be a string"),
        (lambda r: r.update(problem="x" * 3000), "at most 2000 characters"),
        (lambda r: r["provenance"].pop("generator"), "lacks the key 'generator'"),
    ],
)
def test_a_wrong_record_is_ignored_and_its_neighbours_are_not(tmp_path, caplog, change, words):
    def both(data):
        good = json.loads(json.dumps(data["records"][0]))
        change(data["records"][0])
        data["records"].append(good)

    path = write(tmp_path, both)
    assert read_file(path).records == (record(),)
    assert words in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize("raw", [b"", b"schema: 1\nrecords: [", b"\xff", b"a: &a [*a]", b"!!python/name:os.system"])
def test_a_damaged_file_is_ignored_with_one_warning(tmp_path, caplog, raw):
    path = write(tmp_path, raw=raw)
    assert read_file(path).records == ()
    assert read_file(path).records == ()
    assert len(caplog.records) == 1


def test_a_missing_file_is_no_problem(tmp_path, caplog):
    assert read_file(tmp_path / "none.yaml").problems == ()
    assert caplog.records == []


def test_saving_over_a_damaged_file_keeps_its_text_aside(tmp_path, caplog):
    path = write(tmp_path, raw=b"schema: 1\nrecords: [")
    save_records([record()], root=tmp_path, **PLACE)
    assert read_file(path).records == (record(),)
    assert path.with_name("forward_sm80.yaml.rejected-1").read_bytes() == b"schema: 1\nrecords: ["
    assert "its old text is kept" in caplog.text


def test_nothing_half_is_left_when_writing_fails(tmp_path, monkeypatch):
    path = save_records([record()], root=tmp_path, **PLACE)
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_files.os, "fsync", fail)
    with pytest.raises(StoreError, match=r"No space left.*FLASHSMITH_CONFIG_DIR"):
        save_records([record(SPACE[5])], root=tmp_path, **PLACE)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".tmp"] == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="FLASHSMITH_CONFIG_DIR"):
        save_records([record()], root=tmp_path / "file", **PLACE)


def test_an_edited_file_is_read_anew(tmp_path):
    path = save_records([record()], root=tmp_path, **PLACE)
    assert read_file(path).records[0].config == record().config
    path.write_text(path.read_text().replace("B_c: 48", "B_c: 64"))
    assert read_file(path).records[0].config["B_c"] == 64


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "nvidia-h200"), ("", "any"), ("../../etc", "etc"), ("A" * 300, "a" * 64), ("ü/\\", "any")],
)
def test_a_gpu_name_makes_a_safe_folder_name(name, slug, tmp_path):
    assert gpu_slug(name) == slug
    assert tuned_path(tmp_path, "sm_90", name, "f").parent.parent == tmp_path / "sm_90"


def test_processes_that_save_at_once_lose_nothing(tmp_path):
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from flashsmith.runtime.store_files import save_records\n"
        "from helpers_tune import SHAPE, record\n"
        "number = int(sys.argv[1])\n"
        "for length in range(4):\n"
        "    shape = replace(SHAPE, batch=1 + number, seqlen_q=1 + length)\n"
        f"    save_records([record(shape=shape)], root=Path({str(tmp_path)!r}), **{PLACE!r})\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(number)]) for number in range(4)]
    assert [child.wait(timeout=120) for child in children] == [0] * 4
    assert len(read_file(tuned_path(tmp_path, "sm_90", "NVIDIA H200", "forward_sm80")).records) == 16


def test_reading_a_record_checks_it_as_the_file_is_checked():
    with pytest.raises(StoreError, match="must be a map"):
        record_from_dict("x", where="here")
    assert record_from_dict(record().to_dict(), where="here") == record()


def test_a_named_pipe_is_no_file_to_wait_for(tmp_path, caplog):
    path = tmp_path / "sm_90" / "any" / "forward_sm80.yaml"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert read_file(path).problems == ("it is no regular file",)
    assert "no regular file" in caplog.text


def test_a_warning_names_the_path_once(tmp_path, caplog):
    path = tmp_path / "sm_90" / "any" / "forward_sm80.yaml"
    path.parent.mkdir(parents=True)
    for text in ("records: [", "!!python/object:os.system x", "schema: 9"):
        path.write_text(text)
        caplog.clear()
        read_file(path)
        assert caplog.text.count(str(path)) == 1, text


@pytest.mark.parametrize("cc", ["\u0669.0", "9.\u0660", "9", "9.0.0", "-9.0"])
def test_a_compute_capability_is_two_numbers_in_ascii(cc):
    data = record().to_dict()
    with pytest.raises(StoreError, match="cc must be two numbers"):
        record_from_dict({**data, "device": {**data["device"], "cc": cc}}, where="here")


@pytest.mark.parametrize("text", ["!!int '--5'", "!!int ٤", "!!int '5-'"])
def test_what_only_looks_like_an_integer_is_refused(text):
    with pytest.raises(StoreError, match="not a plain string"):
        parse_yaml(text.encode(), where="here")
