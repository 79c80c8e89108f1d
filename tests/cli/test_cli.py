from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys

import pytest

from flashsmith.generator.errors import SpecError
from flashsmith.runtime.commands.application import COMMANDS, application, load_command
from flashsmith.runtime.commands.options import parse_length, parse_lengths, parse_window
from flashsmith.runtime.emulator import object_cache


def test_help_lists_every_command_with_a_whole_line(cli):
    code, out, _ = cli("--help")
    assert code == 0
    for name in COMMANDS:
        assert f"  {name} " in out
    assert "..." not in out.partition("Commands:")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_examples_and_json(cli, name):
    code, out, _ = cli(f"{name} --help")
    assert code == 0
    assert "--json" in out
    assert f"flashsmith {name}" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_command_lines(name):
    from importlib import import_module

    for line in import_module(f"flashsmith.runtime.commands.{name}").EXAMPLES:
        words = shlex.split(line.partition("  (")[0])
        assert words[:2] == ["flashsmith", name]
        load_command(name).make_context(name, words[2:])


def test_the_version(cli):
    from flashsmith import __version__

    assert cli("--version") == (0, f"flashsmith {__version__}\n", "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("generate -d 257", "from 8 to 256, but got 257"),
        ("generate -d 0", "but got 0"),
        ("generate -d 7", "but got 7"),
        ("generate -d sixty", "integer"),
        ("generate --dtype fp64", "Unknown dtype 'fp64'"),
        ("generate --arch sm_75", "found 7.5"),
        ("generate --arch sm_91", "Did you mean 'sm_90'"),
        ("generate --set B_r=17", "multiple of 16"),
        ("generate --set B_r=x", "positive integer"),
        ("generate --set colour=3", "--set takes name=value"),
        ("generate --set q_in_registers=maybe", "true or false"),
        ("generate --section soup", "Unknown section 'soup'"),
        ("generate --window 3", "LEFT,RIGHT"),
        ("generate --window a,b", "--window must be a number"),
        ("generate --softcap nan", "softcap"),
        ("generate --mask-mod nowhere.py:f", "there is no file"),
        ("generate --out /no/such/folder/x.cu", "cannot be written"),
        ("compile --set num_stages=0", "num_stages must be at least 1"),
        ("space --arch nonsense", "Unknown arch"),
        ("tune --seqlens 1k,oops", "--seqlens must be a number"),
        ("tune --seqlens 0", "must be positive"),
        ("tune --trials 0", "--trials"),
        ("tune --budget -3", "--budget"),
        ("tune --device tpu", "--device"),
        ("tune --nheads 6 --nheads-k 4", "multiple of nheads_k"),
        ("tune --nheads -6", "--nheads must be"),
        ("tune --arch sm_80 --gpu Banana", "Unknown sm_80 GPU"),
        ("emulate --flavour vanilla", "Unknown flavour"),
        ("emulate --schedule fair", "Unknown schedule"),
        ("bench --providers magic", "Unknown provider"),
        ("bench --seqlens 32k", "seqlens must be"),
        ("cache --prune lots", "--prune takes a size"),
        ("show --arch sm_1", "Unknown arch"),
        ("emulate --seed 99999999999999999999999", "--seed"),
        ("tune --seed -1", "--seed"),
        ("generate -n 99999999999999", "Lengths must be below 536870912"),
        ("generate -n 1" + "0" * 5000, "--seqlen must be a number"),
        ("compile -n 512m", "Lengths must be below"),
        ("show --call -n 1k --batch 999999999", "batch * nheads at most"),
        ("generate --set B_r=٦٤", "positive integer"),
        ("generate --set B_r=1" + "0" * 5000, "positive integer"),
        ("cache --prune 1" + "0" * 5000, "--prune takes a size"),
        ("bench --dtype fp64", "Unknown dtype"),
        ("bench --head-dims 7", "but got 7"),
        ("bench --budget nan", "--budget"),
        ("bench --device emulator", "--device must be cuda or cuda:INDEX, but"),
        ("bench --out /no/such/folder/x.json", "cannot be written"),
        ("frobnicate", "No such command"),
        ("tune --frobnicate", "No such option"),
    ],
)
def test_usage_errors_are_exit_code_2_and_leave_standard_output_empty(cli, line, words):
    code, out, err = cli(line)
    assert code == 2
    assert out == ""
    assert words in err


def test_other_failures_are_exit_code_1(cli):
    code, out, err = cli("bench --head-dims 64 --seqlens 1k")
    assert (code, out) == (1, "")
    assert "none was found" in err


def test_an_error_with_json_is_json(as_json):
    error = as_json("generate -d 7", code=2)["error"]
    assert error["type"] == "SpecError"
    assert "but got 7" in error["message"]


@pytest.mark.parametrize(
    ("family", "settings", "instruction"),
    [
        ("forward_sm80", "--set B_c=32 --set num_stages=1", "mma_m16n8k16"),
        ("forward_sm90", "--set B_c=96 --set num_warpgroups=3", "wgmma_m64n96k16"),
    ],
)
def test_generate_writes_the_source(cli, as_json, tmp_path, family, settings, instruction):
    line = f"generate -d 64 --causal --arch sm_90 --family {family}"
    code, out, _ = cli(f"{line} {settings}")
    assert code == 0
    assert out.startswith(f"// flashsmith_{family}")
    B_c = settings.split()[1]
    assert B_c in out
    data = as_json(f"{line} {settings}")
    assert data["text"] == out and data["family"] == family
    assert data["config"]["B_c"] == int(B_c.removeprefix("B_c="))
    assert data["config_source"] == "given"
    part = cli(f"{line} --section kernel")[1]
    assert instruction[:5] in part and "cp.async" not in part
    assert instruction in out
    path = tmp_path / "kernel.cu"
    cli(f"{line} {settings} --out {path}")
    assert path.read_text() == out


def test_generate_takes_mask_functions(as_json, tmp_path):
    (tmp_path / "mine.py").write_text("def stripes(b, h, q_idx, kv_idx):\n    return kv_idx % 3 == 0\n")
    data = as_json(f"generate -d 64 --mask-mod {tmp_path}/mine.py:stripes --arch sm_80")
    assert "kv_idx % 3" in data["spec"]


def test_without_a_gpu_the_assumed_architecture_is_said(cli):
    code, out, err = cli("generate -d 64 --section header")
    assert code == 0
    assert "sm_80" in out
    assert "taking sm_80" in err


def test_space_tells_counts_and_reasons(cli, as_json):
    data = as_json("space -d 128 --arch sm_86 --list --all")
    excluded = sum(part["count"] for part in data["excluded"].values())
    assert data["valid"] + excluded == data["candidates"]
    assert len(data["configs"]) == data["valid"]
    assert len(data["exclusions"]) == excluded
    memory = data["excluded"]["shared memory"]
    assert "sm_86 allows 101376" in memory["example"]
    code, out, _ = cli("space -d 128 --arch sm_86")
    assert code == 0
    assert str(memory["count"]) in out
    assert memory["example"][:40] in " ".join(out.split())
    every = cli("space -d 128 --arch sm_86 --all")[1]
    assert every.count("allows 101376") >= memory["count"]


def test_compile_reports_resources(as_json, tmp_path):
    pytest.importorskip("cupy")
    path = tmp_path / "k.cubin"
    data = as_json(f"compile -d 64 --causal --arch sm_80 --out {path}")
    assert data["report"]["spill_store_bytes"] == 0
    assert data["blocks_per_sm"] >= 1
    assert path.stat().st_size == data["cubin_bytes"]
    assert as_json("compile -d 64 --causal --arch sm_80")["cached"]
    listed = as_json("cache")
    assert data["key"][:32] in {entry["path"][-32:] for entry in listed["entries"]}


def test_emulate_finds_nothing_wrong(cli, as_json):
    data = as_json("emulate -d 32 --causal --seqlen 40 --flavour plain --set B_r=64 --set num_warps=4")
    assert data["right"] and data["clean"]
    assert [report["flavour"] for report in data["reports"]] == ["plain"]
    code, out, _ = cli("emulate -d 32 --causal --seqlen 40 --flavour plain --set B_r=64 --set num_warps=4")
    assert code == 0
    assert ": right" in out


def test_emulate_ends_with_1_where_a_kernel_is_wrong(cli, monkeypatch):
    from flashsmith.runtime import verify

    monkeypatch.setattr(verify, "error_and_tolerance", lambda *a, **k: (1.0, 0.1))
    code, out, _ = cli("emulate -d 32 --seqlen 17 --flavour plain --set B_r=64 --set num_warps=4")
    assert code == 1
    assert ": WRONG" in out


def test_tune_without_a_gpu_then_show(cli, as_json, tmp_path):
    pytest.importorskip("cupy")
    data = as_json("tune -d 64 --causal --seqlens 1k --arch sm_80 --max-compile 4 --prove 4 --jobs 1")
    assert data["status"] == "predicted"
    (bucket,) = data["buckets"]
    assert bucket["bucket"]["seqlen_q"] == 1024
    assert data["path"] == str(tmp_path / "config" / "sm_80" / "any" / "forward_sm80.yaml")
    listed = as_json("show --head-dim 64")["records"]
    assert [record["config"] for record in listed if record["source"] == "user"] == [bucket["config"]]
    call = as_json("show --call -d 64 --causal --seqlen 1k --arch sm_80")
    assert call["config"] == bucket["config"]
    assert call["source"] == "user"
    code, out, _ = cli("show --head-dim 64 --arch sm_80")
    assert code == 0
    assert "bf16 d64 causal" in out and "predicted" in out
    generated = as_json("generate -d 64 --causal --seqlen 1k --arch sm_80")
    assert generated["config"] == bucket["config"]
    assert as_json("generate -d 64 --causal --seqlen 1k --arch sm_80 --default")["config_source"] == "default"
    table = cli("tune -d 64 --causal --seqlens 1k --arch sm_80 --max-compile 4 --prove 4 --jobs 1")[1]
    assert "predicted by the cost model, not measured" in table
    assert "TFLOP/s" in table and "Written:" in table


def test_show_restamps_what_is_still_the_same(cli, as_json, tmp_path):
    from dataclasses import replace

    from helpers_tune import ARCH, DEFAULT, SHAPE, SPEC, record

    from flashsmith.runtime.store import Provenance, save_records
    from flashsmith.runtime.tune.records import kernel_digest

    same = Provenance(generator="0" * 16, flashsmith="0.1.0", kernel=kernel_digest(SPEC, DEFAULT, ARCH))
    other = replace(same, kernel="0" * 16)
    records = [record(provenance=same), record(shape=replace(SHAPE, batch=5), provenance=other)]
    path = save_records(records, arch="sm_90", family="forward_sm80", root=tmp_path)
    first, second = as_json(f"show --restamp {path}")["records"]
    assert (first["state"], second["state"]) == ("same", "changed")
    out = " ".join(cli(f"show --restamp {path}")[1].split())
    assert "B4 N4096 H32: up to date" in out
    assert "B5 N4096 H32: another kernel now: left as it was" in out
    assert "flashsmith tune -d 64 --dtype bf16 --seqlens 4096 --batch 5 --nheads 32" in out
    code, _, errors = cli(f"show --restamp {tmp_path / 'none.yaml'}")
    assert code == 1 and "there is no such file" in errors


def test_show_says_that_nothing_is_tuned(cli, monkeypatch, tmp_path):
    from flashsmith.runtime import store

    monkeypatch.setattr(store, "PACKAGED", tmp_path / "none")
    assert "No tuned configs" in cli("show")[1]


def test_doctor_reports_every_check(cli, as_json):
    code, out, _ = cli("doctor")
    data = as_json("doctor", code=code)
    assert data["healthy"] == (code == 0)
    assert {"Python", "NVRTC", "cache folder"} <= {check["name"] for check in data["checks"]}
    for check in data["checks"]:
        assert check["name"] in out


def test_cache_lists_prunes_and_clears(as_json, cli, tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    as_json("compile -d 64 --arch sm_80")
    assert len(as_json("cache")["entries"]) == 1
    assert "1 kernels" in cli("cache")[1]
    kernel = as_json("cache")["entries"][0]
    for number in (1, 2):
        object_cache.cached("kernel-plain", f"{number}" * 64, "kernel", lambda folder: (folder / "kernel").touch())
    newest, older = as_json("cache")["emulator"]["entries"]
    os.utime(older["path"], (1000, 1000))
    listed = as_json("cache")
    assert [len(listed["entries"]), len(listed["emulator"]["entries"])] == [1, 2]
    assert "2 programs of the emulator" in cli("cache")[1] and "kernel-plain" in cli("cache")[1]
    pruned = as_json("cache --prune 1G")
    assert (pruned["removed"], pruned["emulator"]["removed"]) == (0, 0)
    pruned = as_json(f"cache --prune {kernel['bytes'] + newest['bytes']}")
    assert (pruned["removed"], pruned["emulator"]["removed"]) == (0, 1)
    assert [entry["path"] for entry in pruned["emulator"]["entries"]] == [newest["path"]]
    cleared = as_json("cache --clear")
    assert (cleared["removed"], cleared["entries"]) == (1, [])
    assert (cleared["emulator"]["removed"], cleared["emulator"]["entries"]) == (1, [])
    assert os.listdir(cleared["emulator"]["folder"]) == []


def test_ctrl_c_is_130(cli, monkeypatch):
    from flashsmith.runtime import doctor

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "diagnose", interrupt)
    assert cli("doctor") == (130, "", "Interrupted.\n")


def test_a_log_level_is_read_from_the_environment(cli, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_LOG_LEVEL", "loud")
    code, _, err = cli("space -d 64 --arch sm_80")
    assert code == 2
    assert "FLASHSMITH_LOG_LEVEL" in err


@pytest.mark.parametrize(
    ("text", "length"), [("4096", 4096), ("4k", 4096), ("1K", 1024), ("2m", 2 << 20), (" 16k ", 16384)]
)
def test_lengths_are_read(text, length):
    assert parse_length(text) == length


@pytest.mark.parametrize("text", ["", "k", "-1", "4.5k", "4kk", "0x10", "٤", "1e3"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(SpecError):
        parse_length(text)


def test_lists_of_lengths_drop_repetitions():
    assert parse_lengths("1k,4k,1024") == (1024, 4096)


def test_windows_are_read():
    assert parse_window("") == (-1, -1)
    assert parse_window("1k,0") == (1024, 0)
    assert parse_window("-1,5") == (-1, 5)
    assert parse_window("-5,0") == (-1, 0)
    assert parse_window("3,-99") == (3, -1)


def test_importing_the_command_line_is_quick_and_lazy():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import flashsmith.cli\n"
        "bad = {'torch', 'cupy', 'optuna', 'typer', 'rich', 'numpy', 'yaml', 'jinja2'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "from flashsmith.runtime.commands.application import application\n"
        "application()\n"
        "bad = {'torch', 'cupy', 'optuna', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_group_is_built_afresh_each_time():
    assert application() is not application()


def test_a_reader_that_leaves_early_is_no_traceback():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\nfrom flashsmith.cli import main\nmain(['space', '-d', '64', '--all'])"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["tune --trials 0", "tune --frobnicate", "frobnicate", "emulate --seed -1"])
def test_usage_errors_of_the_parser_are_json_too(as_json, cli, line):
    assert as_json(line, code=2)["error"]["message"] in cli(line)[2]


@pytest.mark.parametrize("line", ["-h", "tune -h", "cache -h"])
def test_help_is_h_too(cli, line):
    assert cli(line)[:2] == cli(line.replace("-h", "--help"))[:2]
    assert cli(line)[0] == 0


@pytest.mark.parametrize("line", ["-v space -d 64 --arch sm_80", "space -d 64 --arch sm_80 -v"])
def test_verbose_may_stand_on_either_side(cli, line):
    assert cli(line)[0] == 0
    assert logging.getLogger("flashsmith").level == logging.INFO


def test_the_default_head_dim_is_one():
    defaults = {}
    for name in COMMANDS:
        for parameter in load_command(name).params:
            if parameter.name == "head_dim" and name != "show":  # 0 lists all there
                value = parameter.default
                defaults[name] = int(value[0]) if isinstance(value, list) else value
    assert len(defaults) == 5 and set(defaults.values()) == {128}


def test_an_empty_call_has_the_schedule_asked_for(as_json):
    data = as_json("emulate -d 16 --seqlen 0 --schedule reverse --flavour plain")
    assert data["reports"][0]["schedule"] == "reverse"
