"""Which device a command uses, and what it says where that is not there, or not what was asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashsmith.runtime import driver

TUNE = "tune -d 64 --seqlens 1k --max-compile 4 --prove 0 --jobs 1"


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("FLASHSMITH_DEVICE")


@pytest.fixture
def gpus(monkeypatch):
    """Makes this machine have so many GPUs of compute capability 9.0."""

    def have(count):
        monkeypatch.setattr(driver, "driver_available", lambda: count > 0)
        monkeypatch.setattr(driver, "device_count", lambda: count)
        monkeypatch.setattr(driver, "device_info", lambda index: SimpleNamespace(name="NVIDIA H200", cc=(9, 0)))

    return have


@pytest.mark.parametrize(
    ("count", "wish", "options", "words"),
    [
        (0, "", "--device cuda", "this machine has none"),
        (0, "", "--device cuda --arch sm_80", "this machine has none"),
        (1, "", "--device cuda:99", "this machine has one, cuda:0"),
        (2, "", "--device cuda:2", "this machine has cuda:0 to cuda:1"),
        (1, "", "--device cuda:0 --arch sm_80", "--device cuda:0 is an sm_90, --arch asks for sm_80"),
        (0, "cuda", "", "FLASHSMITH_DEVICE=cuda asks for a GPU"),
        (0, "emulator", "--device cuda", "this machine has none"),
    ],
)
def test_a_gpu_that_is_not_there_is_no_reason_to_predict(cli, gpus, monkeypatch, count, wish, options, words):
    gpus(count)
    monkeypatch.setenv("FLASHSMITH_DEVICE", wish)
    code, out, err = cli(f"{TUNE} {options}")
    assert (code, out) == (2, "")
    assert words in err and "--arch without --device" in err


@pytest.mark.parametrize("options", ["--device emulator", "--arch sm_80", "--predict"])
def test_a_prediction_that_was_asked_for_is_made(as_json, gpus, monkeypatch, options):
    pytest.importorskip("cupy")
    gpus(0)
    monkeypatch.setenv("FLASHSMITH_DEVICE", "cuda")
    assert as_json(f"{TUNE} {options}")["status"] == "predicted"


def test_bench_names_a_gpu_that_is_not_there(cli, gpus):
    gpus(1)
    code, _, err = cli("bench --device cuda:3")
    assert code == 2 and "--device cuda:3" in err


def test_what_a_prediction_ignores_is_said(cli):
    pytest.importorskip("cupy")
    _, _, err = cli(f"{TUNE} --arch sm_80 --budget 5 --exhaustive --trials 60")
    assert "--budget, --trials, --exhaustive: ignored by a prediction" in err
    assert "ignored" not in cli(f"{TUNE} --arch sm_80")[2]


def test_what_a_measurement_ignores_is_said(cli, gpus, monkeypatch):
    from flashsmith.generator.errors import TuneError
    from flashsmith.runtime.tune import study

    def refuse(request, *, progress):
        raise TuneError(f"would tune on {request.gpu}")

    gpus(2)
    monkeypatch.setattr(study, "tune", refuse)
    code, _, err = cli("tune -d 64 --device cuda:1 --prove 3 --gpu X")
    assert code == 1 and "would tune on cuda:1" in err
    assert "--gpu, --prove: ignored by a measurement" in err
