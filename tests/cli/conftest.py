"""What the tests of the command line share: folders of their own, and a way to run a command line."""

from __future__ import annotations

import json
import shlex

import pytest

from flashsmith.cli import run
from flashsmith.runtime.store import forget


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("FLASHSMITH_DEVICE", "emulator")
    forget()
    yield
    forget()


@pytest.fixture
def cli(capfd, monkeypatch):
    """Runs a command line, as in a pipe: (exit code, standard output, standard error)."""
    monkeypatch.delenv("COLUMNS", raising=False)  # test runners set it for their own output

    def call(line):
        code = run(shlex.split(line))
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def as_json(cli):
    """Runs a command line with --json that must succeed: the document, alone on standard output."""

    def call(line, code=0):
        found, out, _ = cli(f"{line} --json")
        assert found == code
        return json.loads(out)

    return call
