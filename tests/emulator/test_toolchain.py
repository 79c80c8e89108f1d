"""The C++ compiler is found, or its absence is explained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flashsmith.generator.errors import MissingComponentError
from flashsmith.runtime.emulator.toolchain import find_toolchain


def test_the_first_compiler_on_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHSMITH_CXX", raising=False)
    found = find_toolchain()
    assert found.command == (shutil.which("g++"),)
    assert found.version
    assert found.version in str(found)


def test_without_a_compiler_the_message_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHSMITH_CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingComponentError, match=r"g\+\+, clang\+\+, c\+\+ is on PATH\. Install g\+\+.*_CXX"):
        find_toolchain()


def test_a_compiler_that_was_asked_for_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_CXX", "no-such-compiler -m64")
    with pytest.raises(MissingComponentError, match=r"FLASHSMITH_CXX must name .* 'no-such-compiler -m64' is not"):
        find_toolchain()


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 3\n", "not a program"])
def test_a_compiler_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text(script)
    broken.chmod(0o755)
    monkeypatch.setenv("FLASHSMITH_CXX", str(broken))
    with pytest.raises(MissingComponentError, match=r"broken-c\+\+ does not run"):
        find_toolchain()


def test_words_after_the_compiler_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_CXX", "g++ -m64")
    assert find_toolchain().command[1:] == ("-m64",)
