"""Commands name the config that a call of attention would use, which always passes the build gate if one does."""

from __future__ import annotations

import json

import pytest
from helpers_tune import record

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.families import family_named
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime import store, store_choice
from flashsmith.runtime.emulated import emulated_run
from flashsmith.runtime.problem import problem_of
from flashsmith.runtime.store import save_records

FAMILY = family_named("forward_sm80")
ARCH = arch_from_name("sm_80")
SPEC = problem_of(dtype="fp16", head_dim=128, softcap=30.0).spec
SHAPE = ProblemShape(4, 4096, 4096, 16, 16)


@pytest.fixture
def spilling(tmp_path, monkeypatch):
    """A config that does not fit the softcap's kernel, as the winner of the plain problem; no packaged records."""
    pytest.importorskip("cupy")
    monkeypatch.setattr(store, "PACKAGED", tmp_path / "none")
    plain = problem_of(dtype="fp16", head_dim=128).spec
    hungry = sorted(FAMILY.space(SPEC, ARCH), key=lambda config: -FAMILY.resources(SPEC, config).registers)
    found = next(
        config
        for config in hungry
        if (config.schedule, config.min_blocks) == ("linear", 1)
        and store_choice.gate_refusal(SPEC, config, ARCH, FAMILY, run_here=False)
    )
    save_records([record(found, plain, SHAPE)], arch="sm_80", family="forward_sm80")
    return found


def test_commands_and_attention_agree_past_a_config_that_spills(spilling, cli, as_json, monkeypatch):
    import torch

    from flashsmith.runtime import emulated

    line = "-d 128 --softcap 30 --dtype fp16 --arch sm_80"
    call = as_json(f"show --call {line}")
    assert call["config"] != spilling.to_dict()
    assert call["source"] == "default"
    assert f"passed over for the build gate: {spilling} (" in call["note"]
    code, out, _ = cli(f"compile {line} --json")
    assert code == 0
    assert json.loads(out)["config"] == as_json(f"generate {line}")["config"] == call["config"]
    used = []
    monkeypatch.setattr(emulated, "emulate_forward", lambda spec, config, *_, **__: used.append(config))
    q = torch.zeros(1, 16, 1, 128, dtype=torch.float16)
    emulated_run(q, q, q, softcap=30.0)
    assert used[0].to_dict() == call["config"]


def test_the_issue_that_brought_this(cli):
    pytest.importorskip("cupy")
    for family in ("forward_sm80", "forward_sm90"):
        assert cli(f"compile --arch sm_90 -d 128 --softcap 30 --dtype fp16 --family {family}")[0] == 0


def test_show_says_which_gpu_the_nearest_record_is_of(cli):
    out = cli("show --call -d 128 --causal --arch sm_90 --family forward_sm80 --gpu 'NVIDIA H100' -n 5k")[1]
    assert "tuned for NVIDIA H200" in out
    assert "record  forward bf16 d128 causal at B4 N4096 H16 on NVIDIA H200:" in out
