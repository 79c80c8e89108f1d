"""What the README and the docs say is so: commands parse, variables exist, links resolve, the example prints."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/ARCHITECTURE.md", "docs/EMULATOR.md", "docs/TUNING.md")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _block_after(text: str, marker: str) -> str:
    """The fenced block that follows `<!-- marker -->`."""
    _, found, rest = text.partition(f"<!-- {marker} -->\n")
    assert found, f"README.md has no marker {marker!r}"
    match = _FENCE.match(rest)
    assert match is not None, f"no fenced block follows the marker {marker!r}"
    return match[2]


def _commands(text: str) -> list[str]:
    """Every `flashsmith ...` command line in the shell blocks of a page."""
    lines = [line for kind, body in _FENCE.findall(text) if kind in ("bash", "console") for line in body.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("#")[0].removeprefix("$ ").split("&&")]
    return [part for part in parts if part.startswith("flashsmith ")]


@pytest.fixture(scope="module")
def readme(repo_root: Path) -> str:
    return (repo_root / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(repo_root: Path, page: str) -> None:
    source = repo_root / page
    targets = [target for target in _LINK.findall(source.read_text()) if not target.startswith("https://")]
    for target in targets:
        path, _, heading = target.partition("#")
        file = (source.parent / path).resolve() if path else source
        assert file.exists(), f"{page} links to {target}"
        if heading and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert heading in anchors, f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(repo_root: Path, page: str) -> None:
    from flashsmith.runtime.commands.application import application

    command = application()
    for line in _commands((repo_root / page).read_text()):
        # Parses every option and value of the command line, and runs nothing.
        name, child, rest = command.resolve_command(
            command.make_context("flashsmith", ["--help"], resilient_parsing=True), shlex.split(line)[1:]
        )
        assert child is not None, f"{page}: {line}"
        child.make_context(name, rest)


def test_readme_shows_commands_at_all(readme: str) -> None:
    assert any(line.startswith("flashsmith tune") for line in _commands(readme))


def test_readme_lists_every_environment_variable(readme: str) -> None:
    from flashsmith.runtime.variables import VARIABLES

    rows = dict(re.findall(r"^\| `(FLASHSMITH_\w+)` \| (.+?) \|", readme, re.MULTILINE))
    assert list(rows) == [variable.name for variable in VARIABLES]


def test_no_environment_variable_is_read_elsewhere(repo_root: Path) -> None:
    names = re.compile(r"environ\S*FLASHSMITH_\w+")
    for top in ("generator", "runtime"):
        for path in (repo_root / top).rglob("*.py"):
            if path.name != "variables.py":
                assert not names.search(path.read_text()), path


def test_readme_shows_the_header_that_the_command_prints(readme: str, capsys: pytest.CaptureFixture[str]) -> None:
    from flashsmith.cli import run

    (command,) = _block_after(readme, "header command").splitlines()
    assert run(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == _block_after(readme, "generated header")


def test_readme_example_is_six_lines_of_python(readme: str) -> None:
    example = _block_after(readme, "example")
    compile(example, "README.md", "exec")
    assert len([line for line in example.splitlines() if line.strip()]) <= 6


def test_readme_python_runs_small_on_the_emulator(readme: str) -> None:
    from flashsmith.runtime.emulated import emulated_attention

    text = _block_after(readme, "example") + _block_after(readme, "mask example")
    small = text.replace('"cuda"', '"cpu"').replace("(2, 4096, 16, 128,", "(1, 128, 2, 128,").replace("4096", "128")
    names = {"emulated_attention": emulated_attention}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(small.replace("flashsmith.attention(", "emulated_attention("), "README.md", "exec"), names)
    assert printed.getvalue() == "(1, 128, 2, 128) torch.bfloat16 (1, 2, 128)\n"


@pytest.mark.gpu
def test_readme_example_prints_its_output(readme: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(_block_after(readme, "example"), "README.md", "exec"), {})
    assert printed.getvalue() == _block_after(readme, "example output")


def test_readme_shows_the_signature_of_attention(readme: str) -> None:
    import inspect

    from flashsmith.runtime.attention import attention

    parameters = inspect.signature(attention).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert _block_after(readme, "signature").strip() == f"attention{inspect.Signature(bare)}"


def test_tuning_explains_every_choice_of_every_family(repo_root: Path) -> None:
    from dataclasses import fields

    from flashsmith.generator.families import FAMILIES
    from flashsmith.runtime.commands.naming import LETTERS

    text = (repo_root / "docs" / "TUNING.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (sm80|sm90|both) \| .+ \|$", text, re.MULTILINE)
    for name, family in FAMILIES.items():
        short = name.removeprefix("forward_")
        documented = {field for field, _, of in rows if of in (short, "both")}
        assert documented == {field.name for field in fields(family.config_type)}
    for field, letters, _ in rows:
        if field in LETTERS and field != "B_r":
            assert f"`{LETTERS[field]}" in letters, field
