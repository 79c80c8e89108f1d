"""The tree and pyproject.toml agree: nothing that works in a checkout is missing from the wheel."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

#: The top-level folders whose contents the wheel carries.
SHIPPED = ("generator", "runtime", "templates", "tuned_configs")
#: Modules come with their package; notes are for people who read the checkout; locks are left by a tuner at work.
NO_PATTERN_NEEDED = {".py", ".md", ".lock"}

#: The name of a dependency's module, where it is not the dependency's own.
MODULES = {"PyYAML": "yaml"}
#: What the extras [cuda12] and [cuda13] bring.
OPTIONAL_MODULES = {"cupy", "cupy_backends", "pynvml"}


@pytest.fixture(scope="module")
def pyproject(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text())


def test_packages_list_equals_the_tree(repo_root: Path, pyproject: dict[str, Any]) -> None:
    found = {"flashsmith"}
    for top in SHIPPED:
        for init in (repo_root / top).rglob("__init__.py"):
            found.add(".".join(("flashsmith", *init.parent.relative_to(repo_root).parts)))
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_folder_with_python_is_a_package(repo_root: Path) -> None:
    bare = {
        str(module.parent.relative_to(repo_root))
        for top in SHIPPED
        for module in (repo_root / top).rglob("*.py")
        if not (module.parent / "__init__.py").is_file()
    }
    assert not bare, "a folder without __init__.py is silently left out of the wheel"


def test_root_holds_only_its_three_modules(repo_root: Path) -> None:
    assert sorted(path.name for path in repo_root.glob("*.py")) == ["__init__.py", "__main__.py", "cli.py"]


def test_every_data_file_matches_a_pattern(repo_root: Path, pyproject: dict[str, Any]) -> None:
    patterns: dict[str, list[str]] = pyproject["tool"]["setuptools"]["package-data"]
    listed: set[Path] = set()
    for package, globs in patterns.items():
        folder = repo_root.joinpath(*package.split(".")[1:])
        for pattern in globs:
            listed.update(folder.glob(pattern))
    forgotten = []
    for top in SHIPPED:
        for path in (repo_root / top).rglob("*"):
            if path.is_dir() or "__pycache__" in path.parts or path.suffix in NO_PATTERN_NEEDED:
                continue
            if path not in listed:
                forgotten.append(str(path.relative_to(repo_root)))
    assert not forgotten, "add a pattern to [tool.setuptools.package-data]"


def test_dependencies_are_what_the_package_imports(repo_root: Path, pyproject: dict[str, Any]) -> None:
    imported: set[str] = set()
    for path in (
        *repo_root.glob("*.py"),
        *(repo_root / "generator").rglob("*.py"),
        *(repo_root / "runtime").rglob("*.py"),
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                imported.add(node.module.split(".")[0])
    listed = {re.split(r"[<>=]", line)[0] for line in pyproject["project"]["dependencies"]}
    modules = {MODULES.get(name, name) for name in listed}
    assert imported - sys.stdlib_module_names - {"flashsmith"} - OPTIONAL_MODULES == modules


def test_version_is_the_first_of_the_changelog(repo_root: Path, pyproject: dict[str, Any]) -> None:
    import flashsmith

    headings = [line for line in (repo_root / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].removeprefix("## ").split()[0] == flashsmith.__version__
    assert pyproject["project"]["dynamic"] == ["version"]


def test_files_stay_small_enough_to_read(repo_root: Path) -> None:
    long = {
        str(path.relative_to(repo_root)): lines
        for top in (*SHIPPED, "tests", "benchmarks", "examples")
        for path in (repo_root / top).rglob("*")
        if path.suffix in {".py", ".jinja", ".cpp", ".h"} and (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long, "a file of more than 400 lines is two files"
