"""What `import flashsmith` costs and does: no CUDA, no folder, nothing heavy, and a generator that stands alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Seconds beyond torch's own import.
IMPORT_BUDGET_S = 0.2
HEAVY = ("torch", "cupy", "optuna", "pydantic", "jinja2", "typer", "rich", "numpy", "yaml")
#: What a user's call of `attention` must never pay for.
NOT_ON_THE_CALL_PATH = ("cupy", "optuna", "pydantic", "typer", "rich", "sqlalchemy", "flashsmith.runtime.tune")


def _python(code: str, **changes: str) -> Any:
    """The JSON that `code` prints in a fresh interpreter without FLASHSMITH_* variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHSMITH_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment | changes,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_loads_nothing_heavy() -> None:
    loaded = _python("import sys, json, flashsmith; print(json.dumps(sorted(sys.modules)))")
    assert not set(HEAVY) & set(loaded)


def test_attention_loads_neither_tuner_nor_compiler() -> None:
    loaded = _python("import sys, json, flashsmith; flashsmith.attention; print(json.dumps(sorted(sys.modules)))")
    assert not set(NOT_ON_THE_CALL_PATH) & set(loaded)


def test_import_is_fast() -> None:
    code = (
        "import json, time, torch; begin = time.process_time(); import flashsmith; flashsmith.attention;"
        " print(json.dumps(time.process_time() - begin))"
    )
    # CPU seconds, the best of three: the figure is the import's, not the machine's load. The first run leaves the
    # bytecode that an installation has.
    assert min(_python(code, PYTHONDONTWRITEBYTECODE="") for _ in range(3)) <= IMPORT_BUDGET_S


def test_import_starts_no_cuda_and_makes_no_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    code = """
import json, torch
def cuda_libraries():
    words = ("libcuda.so", "libnvrtc", "libcudart")
    return {line.split()[-1] for line in open("/proc/self/maps") if any(word in line for word in words)}
before = cuda_libraries()
import flashsmith
flashsmith.attention
print(json.dumps([torch.cuda.is_initialized(), sorted(cuda_libraries() - before)]))
"""
    folders = {name: str(home / name) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")}
    initialized, libraries = _python(code, HOME=str(home), **folders)
    assert not initialized
    assert libraries == []
    assert list(home.iterdir()) == []


def test_generator_works_without_torch_cupy_and_optuna() -> None:
    code = """
import sys, json
for name in ("torch", "cupy", "cupy_backends", "optuna", "numpy"):
    sys.modules[name] = None  # any import of it now raises ImportError
import importlib, pkgutil
import flashsmith.generator
names = [m.name for m in pkgutil.walk_packages(flashsmith.generator.__path__, "flashsmith.generator.")]
for name in names:
    importlib.import_module(name)
from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import families_for
from flashsmith.generator.rendering import render
from flashsmith.generator.spec import AttentionSpec
spec, arch = AttentionSpec(head_dim=64), ARCHS["sm_90"]
family = families_for(spec, arch)[0]
print(json.dumps([names, len(render(spec, family.default_config(spec, arch), arch).text)]))
"""
    names, length = _python(code)
    assert "flashsmith.generator.rendering" in names
    assert length > 1000


def test_a_child_forked_after_the_import_can_use_it() -> None:
    code = """
import json, os
import flashsmith
child = os.fork()
if child == 0:
    os._exit(0 if callable(flashsmith.attention) else 1)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    assert _python(code) == 0
