"""The environment variables: one place, defaults, and what a wrong value says."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import platformdirs
import pytest

from flashsmith.generator.errors import UsageError
from flashsmith.runtime import variables

ROOT = Path(variables.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_no_other_module_reads_a_variable() -> None:
    reads = re.compile(r"(environ\[|environ\.get|getenv).*FLASHSMITH_")
    offenders = [
        str(path.relative_to(ROOT))
        for folder in ("generator", "runtime")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "variables.py" and reads.search(path.read_text())
    ]
    assert offenders == []


def test_table_names_every_constant_once() -> None:
    text = Path(variables.__file__).read_text()
    assert sorted(re.findall(r'"(FLASHSMITH_\w+)"', text)) == sorted(v.name for v in variables.VARIABLES)


def test_folders_follow_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "a b é"))
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", "relative")
    monkeypatch.chdir(tmp_path)
    assert variables.cache_dir() == tmp_path / "a b é"
    assert variables.config_dir() == tmp_path / "relative"
    assert not variables.cache_dir().exists()


def test_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", "~/kernels")
    assert variables.cache_dir() == tmp_path / "kernels"


def test_an_empty_value_is_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert variables.cache_dir() == tmp_path / "flashsmith"
    assert variables.config_dir() == tmp_path / "config" / "flashsmith"
    assert variables.VARIABLES[0].value is None


@pytest.mark.parametrize("base", [None, "", "/xdg", "~/xdg", "relative"])
@pytest.mark.parametrize("kind", ["cache", "config"])
def test_the_default_is_platformdirs_own(monkeypatch: pytest.MonkeyPatch, kind: str, base: str | None) -> None:
    name = f"XDG_{kind.upper()}_HOME"
    monkeypatch.delenv(name, raising=False)
    if base is not None:
        monkeypatch.setenv(name, base)
    expected = {"cache": platformdirs.user_cache_path, "config": platformdirs.user_config_path}[kind]("flashsmith")
    found = {"cache": variables.cache_dir, "config": variables.config_dir}[kind]()
    # The XDG rule calls a relative folder invalid, to be ignored.
    assert found == (expected if base in (None, "", "/xdg") else Path.home() / f".{kind}" / "flashsmith")


def test_an_unknown_home_gives_an_absolute_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_user_folder", lambda kind: Path("~") / kind)
    assert variables.cache_dir().is_absolute()
    assert variables.cache_dir() != variables.config_dir()


def test_defaults() -> None:
    assert variables.cxx() is None
    assert variables.device() is None
    assert variables.log_level() == logging.WARNING
    assert variables.lock_seconds() == 120


@pytest.mark.parametrize(
    ("name", "text", "read", "says"),
    [
        ("FLASHSMITH_DEVICE", "cuad", variables.device, "Did you mean 'cuda'"),
        ("FLASHSMITH_LOG_LEVEL", "debgu", variables.log_level, "Did you mean 'debug'"),
        ("FLASHSMITH_LOCK_SECONDS", "nan", variables.lock_seconds, "number of seconds"),
        ("FLASHSMITH_LOCK_SECONDS", "-1", variables.lock_seconds, "number of seconds"),
        ("FLASHSMITH_LOCK_SECONDS", "soon", variables.lock_seconds, "number of seconds"),
    ],
)
def test_wrong_values_name_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, read: object, says: str
) -> None:
    monkeypatch.setenv(name, text)
    assert callable(read)
    with pytest.raises(UsageError, match=says) as caught:
        read()
    assert name in str(caught.value)
