"""The C++ compiler is found, or its absence is explained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flashsmith.generator.errors import EmulatorError, MissingComponentError
from flashsmith.runtime.emulator import build
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


def test_quotes_that_do_not_close_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_CXX", "g++ '-m64")
    with pytest.raises(
        MissingComponentError, match=r"FLASHSMITH_CXX must be a command line, but .* No closing quotation"
    ):
        find_toolchain()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_writes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_CXX", "/bin/true")
    with pytest.raises(
        EmulatorError, match=r"engine does not compile: /bin/true .* wrote no engine\.o.*FLASHSMITH_CXX"
    ):
        build.engine_object("plain")


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    once = tmp_path / "once-c++"
    once.write_text("#!/bin/sh\necho once 1.0\n")
    once.chmod(0o755)
    monkeypatch.setenv("FLASHSMITH_CXX", str(once))
    find_toolchain()  # its version is known from here on
    once.write_text("no program")
    with pytest.raises(EmulatorError, match=r"once-c\+\+ .* does not run: .*FLASHSMITH_CXX"):
        build.engine_object("plain")
