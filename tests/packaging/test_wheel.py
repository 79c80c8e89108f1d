"""The wheel, built from a copy of the checkout (or given by `pytest --wheel`), installed and used outside of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

TOP = ("generator", "runtime", "templates", "tuned_configs")
SHIPPED_SUFFIXES = {".py", ".jinja", ".yaml", ".cpp", ".h"}
ROOT_FILES = {"__init__.py", "__main__.py", "cli.py", "py.typed"}


def _run(*command: str | Path, cwd: Path) -> str:
    # A checkout on PYTHONPATH would hide the installed package.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--wheel")
    if given is not None:
        return Path(given).resolve()
    # A copy: a build leaves build/ and an egg-info behind, and takes stale files from there.
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info", "venv", "node_modules")
    shutil.copytree(repo_root, folder / "checkout", ignore=ignore)
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=folder / "checkout")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has the wheel and, for the rest, this environment's packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=folder)
    site = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # Searched after its own packages, and without this environment's .pth files: an editable install does not count.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(site) / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder / "bin"


def test_wheel_holds_the_tree_and_nothing_else(wheel: Path, repo_root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"flashsmith/{name}" for name in ROOT_FILES}
    for top in TOP:
        for path in (repo_root / top).rglob("*"):
            if path.suffix in SHIPPED_SUFFIXES and "__pycache__" not in path.parts:
                expected.add(f"flashsmith/{path.relative_to(repo_root)}")
    assert names == expected


def test_wheel_carries_licence_and_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(info["METADATA"]).decode()
        entry_points = archive.read(info["entry_points.txt"]).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "licenses/LICENSE" in info
    assert "flashsmith = flashsmith.cli:main" in entry_points
    for extra in ("cuda12", "cuda13", "test", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_installed_package_is_the_wheels(installed: Path, repo_root: Path, tmp_path: Path) -> None:
    where = _run(installed / "python", "-c", "import flashsmith; print(flashsmith.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    assert not Path(where).is_relative_to(repo_root)


def test_installed_command_says_what_it_can_do(installed: Path, tmp_path: Path) -> None:
    text = _run(installed / "flashsmith", "--help", cwd=tmp_path)
    for command in ("generate", "compile", "emulate", "space", "tune", "bench", "show", "doctor", "cache"):
        assert command in text
    assert _run(installed / "python", "-m", "flashsmith", "--help", cwd=tmp_path)


def test_installed_package_generates_a_kernel(installed: Path, tmp_path: Path) -> None:
    code = """
from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import families_for
from flashsmith.generator.rendering import render
from flashsmith.generator.spec import AttentionSpec
spec, arch = AttentionSpec(head_dim=64), ARCHS["sm_90"]
family = families_for(spec, arch)[0]
source = render(spec, family.default_config(spec, arch), arch)
open("kernel.cu", "w").write(source.text)
print(source.entry)
"""
    entry = _run(installed / "python", "-c", code, cwd=tmp_path).strip()
    text = (tmp_path / "kernel.cu").read_text()
    assert f"{entry}(const __grid_constant__ Arguments args)" in " ".join(text.split())
    assert "{{" not in text
