"""What every test shares: the import path of the helpers, one kernel cache a run, and the skip of GPU tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
#: `helpers_<topic>.py` beside this file are imported by name.
sys.path.insert(0, str(TESTS))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashsmith")
    group.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")
    group.addoption(
        "--kernel-cache",
        metavar="DIR",
        help="keep compiled kernels and emulator objects in DIR from run to run (default: a temporary folder)",
    )
    group.addoption("--wheel", metavar="FILE", help="test this wheel instead of one built from the checkout")


# The machine may be busy: a time limit per example would measure that. Failures are found again from the seed printed.
hypothesis.settings.register_profile("flashsmith", deadline=None)
hypothesis.settings.load_profile("flashsmith")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu_reason() if gpu_items else None
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu_reason() -> str | None:
    """Why GPU tests cannot run here, or None if they can."""
    import torch

    if torch.version.cuda is None:
        return f"needs a CUDA device; torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "needs a CUDA device; torch sees none"
    return None


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout: the folder that holds pyproject.toml."""
    return TESTS.parent


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True where goldens are to be written anew (`pytest --update-golden`)."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session", autouse=True)
def flashsmith_folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that holds this run's cache: shared by all workers and child processes, never the user's own.

    A test that needs an empty cache sets FLASHSMITH_CACHE_DIR itself, with `monkeypatch`.
    """
    base = tmp_path_factory.getbasetemp()
    # Under xdist each worker's base is a child of the run's.
    run = base.parent if hasattr(request.config, "workerinput") else base
    chosen = request.config.getoption("--kernel-cache")
    folders = {
        "FLASHSMITH_CACHE_DIR": Path(chosen).resolve() if chosen else run / "kernel-cache",
        "FLASHSMITH_CONFIG_DIR": base / "user-configs",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in folders.items():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            patch.setenv(name, str(folder))
        yield folders["FLASHSMITH_CACHE_DIR"]
