from __future__ import annotations

import json

import pytest
from helpers_tune import SHAPE, SPACE

from flashsmith.generator.errors import TuneError
from flashsmith.runtime.tune.log import Trial, TrialLog, config_key, read_rows, read_trials, unfinished_trials

SESSION = {"spec": "abc", "arch": "sm_90", "device": {"cc": [9, 0]}}


def trial(number, **changes):
    values = {"outcome": "ok", "ms_median": 1.0 + number, "n": 9, "registers": 99, **changes}
    return Trial(config=SPACE[number].to_dict(), shape=SHAPE, **values)


def test_a_trial_round_trips_and_names_its_class():
    one = trial(0, message="words", raced=True, spec="forward bf16 d64")
    data = json.loads(json.dumps(one.to_dict()))
    assert data["class"] == "ok"
    assert Trial.from_dict(data) == one


def test_lines_are_appended_and_read_back(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    for number in range(2):
        with TrialLog(path) as log:
            log.write(trial(number).to_dict())
    assert [t.ms_median for t in read_trials(path)] == [1.0, 2.0]


def test_a_half_last_line_is_skipped_and_closed(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(trial(0).to_dict()) + '\n{"kind": "trial", "conf')
    with TrialLog(path) as log:
        log.write(trial(1).to_dict())
    assert [t.ms_median for t in read_trials(path)] == [1.0, 2.0]
    assert "Skipped 1 damaged line" in caplog.text


def test_alien_rows_are_no_trials(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    rows = [
        [1, 2],
        {"kind": "trial"},
        {"kind": "trial", "class": "magic", "config": {}, "shape": {}},
        {**trial(0).to_dict(), "shape": {"batch": -1}},
        trial(1).to_dict(),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read_trials(path)) == 1


def test_no_log_is_no_rows(tmp_path):
    assert list(read_rows(tmp_path / "none.jsonl")) == []


def test_two_runs_cannot_write_one_log(tmp_path):
    path = tmp_path / "log.jsonl"
    with TrialLog(path), pytest.raises(TuneError, match="--log"):
        TrialLog(path)
    TrialLog(path).close()


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        TrialLog(tmp_path / "file" / "log.jsonl")


def test_resume_takes_the_open_session_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [
        {"kind": "session", **SESSION, "spec": "another"},
        trial(0).to_dict(),
        {"kind": "session", **SESSION},
        trial(1).to_dict(),
        {"kind": "winner", "shape": SHAPE.to_dict()},
        {"kind": "session", **SESSION},
        trial(2).to_dict(),
        trial(3, outcome="crash", ms_median=None).to_dict(),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = unfinished_trials(path, SESSION, SHAPE)
    assert [t.config for t in kept] == [SPACE[2].to_dict(), SPACE[3].to_dict()]
    assert unfinished_trials(path, {**SESSION, "arch": "sm_80"}, SHAPE) == []
    with TrialLog(path) as log:
        log.write({"kind": "session", **SESSION})
        log.write(trial(4).to_dict())
        assert len(unfinished_trials(path, SESSION, SHAPE)) == 3
        log.write({"kind": "fresh"})
    assert unfinished_trials(path, SESSION, SHAPE) == []


def damaged_rows():
    """Lines of a log that are no trials, and the good trial that each is made from."""
    good = trial(0).to_dict()
    changes = [
        *({"ms_median": value} for value in (-1, 0, float("nan"), float("inf"), "abc", True, None, [], 10**400)),
        *({"ms_spread": value} for value in (-0.1, "wide", None)),
        *({"n": value} for value in (-3, 1.5, "9")),
        *({"raced": 1}, {"registers": None}, {"compile_s": "fast"}, {"message": 7}, {"spec": None}),
        *({"config": value} for value in ([], {}, None, [["B_r", 64]], {"B_r": None}, {"B_r": [64]}, "B_r")),
        *({"shape": value} for value in ([], None, 7, {"batch": "4"})),
        *({"class": value} for value in ("magic", [], None, "crash")),
    ]
    return [json.dumps({**good, **change}) for change in changes]


@pytest.mark.parametrize("line", ["[" * 100_000, '{"kind":' * 50_000, "1" * 5000, *damaged_rows()])
def test_a_damaged_line_is_counted_and_the_run_goes_on(tmp_path, caplog, line):
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join((json.dumps({"kind": "session", **SESSION}), line, json.dumps(trial(1).to_dict()), "")))
    assert [t.ms_median for t in unfinished_trials(path, SESSION, SHAPE)] == [2.0]
    assert caplog.text.count("Skipped 1 damaged line") == 1
    assert [t.ms_median for t in read_trials(path)] == [2.0]


def test_a_config_of_another_space_is_no_trial_to_resume(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    foreign = {**trial(0).to_dict(), "config": {"B_r": 7}}
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in ({"kind": "session", **SESSION}, foreign, trial(1).to_dict()))
    )
    space = {config_key(config.to_dict()) for config in SPACE}
    assert [t.ms_median for t in unfinished_trials(path, SESSION, SHAPE, space=space)] == [2.0]
    assert "Skipped 1 damaged line" in caplog.text
