"""Many compiles at once: order, limits, crashes, interrupts; with fake workers, and once with real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers_compile import FakeConfig

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import MissingComponentError
from flashsmith.runtime import compile_pool, compiler, nvrtc_library
from flashsmith.runtime.compile_pool import CompileJob, CompileOutcome, compile_many

SM_90 = ARCHS["sm_90"]

#: Speaks the worker's protocol; `config["scale"]` says what to do with the job.
WORKER = (
    textwrap.dedent(
        """
        import base64, json, os, sys, time
        print(json.dumps(dict()), flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            do = job["config"]["scale"]
            report = dict(registers=40, spill_store_bytes=0, spill_load_bytes=0, stack_bytes=0, smem_bytes=0)
            report["warnings"] = list()
            answer = dict(entry="k%d" % do, cubin=base64.b64encode(b"c%d" % do).decode(), report=report,
                          nvrtc_version="13.0", target=job["arch"], seconds=0.1, cached=False, key="key%d" % do)
            if do == 100: report["spill_store_bytes"] = 8
            if do == 101: answer = dict(failure="compile", message="no")
            if do == 102: time.sleep(60)
            if do == 103:
                print("ptxas died here", file=sys.stderr)
                os._exit(3)
            if do == 104: answer = dict(failure="missing", message="install it")
            if do == 105: answer = dict(nonsense=1)
            if do == 106:
                print("not json", flush=True)
                continue
            if do >= 200: time.sleep(0.2)
            print(json.dumps(answer), flush=True)
        """
    )
    .replace("{", "{{")
    .replace("}", "}}")
)


@dataclass(frozen=True)
class Spec:
    digest: str = "5" * 64

    def to_dict(self) -> dict[str, Any]:
        return {"op": "forward"}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_memory", {})
    known = nvrtc_library.Compiler(version="13.0", build="feedbeef", path="")
    monkeypatch.setattr(compiler, "installed_compiler", lambda: known)
    monkeypatch.setattr(compiler, "_loaded_compiler", None)


def jobs(*scales: int) -> list[CompileJob]:
    spec: Any = Spec()
    configs: list[Any] = [FakeConfig(scale) for scale in scales]
    return [CompileJob(spec, config, SM_90) for config in configs]


def many(*scales: int, **options: Any) -> list[CompileOutcome]:
    return compile_many(jobs(*scales), worker_program=WORKER, **options)


def test_outcomes_are_in_the_order_of_the_jobs() -> None:
    seen: list[tuple[int, int]] = []
    outcomes = many(200, 1, 2, 3, 4, 5, workers=2, progress=lambda outcome, done, total: seen.append((done, total)))
    assert [o.kernel.cubin for o in outcomes if o.kernel] == [b"c200", b"c1", b"c2", b"c3", b"c4", b"c5"]
    assert [o.failure for o in outcomes] == [""] * 6
    assert seen == [(n, 6) for n in range(1, 7)]


def test_progress_is_called_in_the_callers_thread() -> None:
    names = set()
    many(1, 2, 3, workers=3, progress=lambda *_: names.add(threading.current_thread()))
    assert names == {threading.current_thread()}


def test_each_failure_has_its_class_and_the_rest_goes_on() -> None:
    outcomes = many(1, 100, 101, 102, 103, 105, 106, 2, workers=1, time_limit=1.0)
    assert [o.failure for o in outcomes] == ["", "spill", "compile", "timeout", "crash", "crash", "crash", ""]
    assert outcomes[1].kernel is not None
    assert "8 bytes of spill stores" in outcomes[1].message
    assert outcomes[2].message == "no"
    assert "within 1 s" in outcomes[3].message
    assert 0.9 < outcomes[3].seconds < 10
    assert "ptxas died here" in outcomes[4].message
    assert "exit code 3" in outcomes[4].message


def test_a_missing_component_ends_all_at_once() -> None:
    start = time.perf_counter()
    with pytest.raises(MissingComponentError, match="install it"):
        many(102, 104, workers=2)
    assert time.perf_counter() - start < 20


def test_workers_run_at_the_same_time() -> None:
    many(1, 2, 3, 4, workers=4)
    start = time.perf_counter()
    many(*range(200, 212), workers=1)
    alone = time.perf_counter() - start
    compiler.forget()
    start = time.perf_counter()
    many(*range(200, 212), workers=4)
    assert time.perf_counter() - start < alone


def test_an_interrupt_ends_the_workers() -> None:
    pids: list[int] = []
    real = subprocess.Popen

    class Recording(real):  # type: ignore[type-arg, misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            pids.append(self.pid)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Recording)
        with pytest.raises(KeyboardInterrupt):
            many(1, 102, 102, workers=2, progress=interrupt)
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_worker_that_cannot_start_is_a_crash() -> None:
    (outcome,) = compile_many(jobs(1), worker_program="raise SystemExit('no flashsmith here')")
    assert outcome.failure == "crash"
    assert "no flashsmith here" in outcome.message


def test_no_jobs_start_no_worker() -> None:
    assert compile_many([], worker_program="raise SystemExit") == []


def test_kernels_are_remembered_where_no_disk_keeps_them() -> None:
    (job,) = jobs(1)
    key = compiler.kernel_key(job.spec, job.config, job.arch)
    program = WORKER.replace('key="key%d" % do', f'key="{key.digest}"')
    assert compile_many([job], worker_program=program)[0].failure == ""
    (again,) = compile_many([job], worker_program="raise SystemExit")
    assert again.kernel is not None
    assert again.kernel.cached


def test_default_workers_is_what_this_process_may_use() -> None:
    assert 1 <= compile_pool.default_workers() <= (os.cpu_count() or 1)


NOISY = """
import os, sys
sys.path[:] = {path!r}
from flashsmith.generator.errors import CompileError
from flashsmith.runtime import compile_pool, compiler

def compile_kernel(*args, **options):
    os.write(1, b"a library prints to file descriptor 1\\n")
    print("and Python to sys.stdout")
    raise CompileError("the answer")

compiler.compile_kernel = compile_kernel
compile_pool.main()
"""


def test_a_library_that_prints_does_not_break_the_protocol() -> None:
    from flashsmith.generator.families import families_for
    from flashsmith.generator.spec import AttentionSpec

    spec = AttentionSpec()
    config = families_for(spec, SM_90)[0].default_config(spec, SM_90)
    (outcome,) = compile_many([CompileJob(spec, config, SM_90)], worker_program=NOISY)
    assert (outcome.failure, outcome.message) == ("compile", "the answer")


REAL = textwrap.dedent(
    """
    import sys
    from flashsmith.generator.arch import ARCHS
    from flashsmith.generator.families import families_for
    from flashsmith.generator.spec import AttentionSpec
    from flashsmith.runtime import compiler
    from flashsmith.runtime.compile_pool import CompileJob, compile_many

    spec, arch = AttentionSpec(head_dim=32), ARCHS["sm_80"]
    family = families_for(spec, arch)[0]
    configs = family.space(spec, arch)[:3]
    bad = next(c for c in family.candidates(spec, arch) if family.exclusion(spec, c, arch) is not None)
    jobs = [CompileJob(spec, c, arch) for c in (*configs, bad)]
    outcomes = compile_many(jobs, workers=2)   # at module level: no worker runs this module again
    print(*[o.failure or "good" for o in outcomes])
    assert [o.kernel.cubin[:4] for o in outcomes[:3]] == [b"\\x7fELF"] * 3
    assert "cupy" not in sys.modules and "jinja2" not in sys.modules
    assert all(o.kernel.cached for o in compile_many(jobs[:3]))
    """
)


def test_real_workers(tmp_path: Path) -> None:
    if nvrtc_library.installed_compiler() is None:
        pytest.skip("needs CuPy and an NVRTC wheel")
    script = tmp_path / "script.py"
    script.write_text(REAL)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["good", "good", "good", "config"]
