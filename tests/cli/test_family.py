"""--family: the best kernel family unless another is named; each has its own records."""

from __future__ import annotations

import pytest
from helpers_tune import DEFAULT, FAMILY, SHAPE, SPEC, record

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import FAMILIES
from flashsmith.runtime.store import save_records


@pytest.mark.parametrize("command", ["generate", "compile", "emulate", "space", "tune", "bench", "show", "show --call"])
def test_an_unknown_family_is_a_usage_error_with_the_nearest(cli, command):
    code, out, err = cli(f"{command} --family forward_sm9" + ("" if command == "bench" else " --arch sm_90"))
    assert (code, out) == (2, "")
    assert "kernel family 'forward_sm9'" in err and "Did you mean 'forward_sm90'" in err


def test_a_family_that_cannot_do_it_says_why(cli):
    code, _, err = cli("space -d 64 --arch sm_86 --family forward_sm90")
    assert code == 2
    assert "forward_sm90 cannot do forward bf16 d64" in err and "it needs compute capability 9.0" in err


def test_the_best_family_is_the_default_and_an_older_one_stays_available(as_json):
    assert as_json("space -d 64 --arch sm_90")["family"] == "forward_sm90"
    older = as_json("space -d 64 --arch sm_90 --family forward_sm80")
    assert older["family"] == "forward_sm80" and "num_warps" in older["default"]
    assert as_json("show --call -d 64 --arch sm_90")["family"] == "forward_sm90"
    assert as_json("show --call -d 64 --arch sm_90 --family forward_sm80")["family"] == "forward_sm80"


def test_each_family_has_its_own_file_of_winners(as_json, tmp_path):
    """Records of both lie side by side; a call of one family never takes the other's."""
    hopper = FAMILIES["forward_sm90"].default_config(SPEC, ARCHS["sm_90"])
    root = tmp_path / "config"
    for config in (DEFAULT, hopper):
        save_records([record(config, ties=())], arch="sm_90", family=config.family, gpu="Test GPU", root=root)
    assert {p.name for p in (root / "sm_90" / "test-gpu").glob("*.yaml")} == {"forward_sm80.yaml", "forward_sm90.yaml"}
    call = f"show --call -d 64 --arch sm_90 --gpu 'Test GPU' --seqlen 4k --batch {SHAPE.batch}"
    for family, config in ((FAMILY.name, DEFAULT), ("forward_sm90", hopper)):
        found = as_json(f"{call} --family {family}")
        assert (found["family"], found["config"], found["source"]) == (family, config.to_dict(), "user")
        listed = as_json(f"show --family {family} --arch sm_90 --gpu 'Test GPU'")["records"]
        assert [one["config"] for one in listed] == [config.to_dict()]
