"""Holds the engine against a GPU: every primitive, the same kernel text and inputs, the outputs compared.

    python -m flashsmith.runtime.emulator.conformance --out FILE             on a machine with a GPU
    python -m flashsmith.runtime.emulator.conformance --out FILE --gpu-only  the same, the engine's part left for later
    python -m flashsmith.runtime.emulator.conformance --replay FILE          anywhere, with the GPU's recorded outputs

`--new-against EARLIER` runs only what has not passed in that record, and takes the rest from it.

The file is JSON: the GPU, the engine, and per case the rule, the count of words that break it and the worst difference.
It keeps the GPU's outputs (their digest alone where the engine gave the same bits), so that the engine can be held
against them again without the GPU. Without a C++ compiler the GPU's outputs are recorded for a later replay.

A case that crashes, hangs or ruins the GPU's context is recorded as that, and the next one runs in a new process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...generator.errors import EmulatorError, FlashsmithError, LaunchError, MissingComponentError
from .conformance_cases import cases_for
from .conformance_earlier import in_order, passed_before, require_same_gpu, runs_before
from .conformance_kernels import ENTRY, Case
from .conformance_record import (
    Record,
    broken_engine,
    compare,
    is_comparable,
    line_of,
    record_of,
    replay,
    require_same_case,
)
from .conformance_rules import TrapRule
from .conformance_worker import Gpu, Outcome, WorkerGpu, isolate

SCHEMA = 3
#: Seconds that one case may take on the GPU.
CASE_SECONDS = 10.0
#: Seconds between two writes of an unfinished record.
_SAVE_SECONDS = 2.0


def run_on_engine(case: Case, **options: Any) -> Any:
    """The words that the engine writes for `case`. Raises EmulatorError where the kernel breaks a rule.

    For a case that must trap, the messages of the engine's findings instead.

    `options` are those of `emulate_text`: the flavour and the schedule.
    """
    import numpy as np

    from .host_text import host_text_of
    from .job import HostBuffer
    from .run import emulate_text

    out = np.full(case.blocks * case.items, 0xFFFFFFFF, dtype=np.uint32)
    arrays = {**case.arrays, "out": out}
    report = emulate_text(
        host_text_of(case.sections, entry=ENTRY, file_name=f"{case.name}.cu"),
        case.pack({name: array.ctypes.data for name, array in arrays.items()}, gpu=False),
        pointers=case.pointers(),
        grid=case.blocks,
        threads=case.threads,
        smem_bytes=case.smem_bytes,
        buffers=tuple(HostBuffer(a.ctypes.data, a.nbytes, name, name == "out") for name, a in arrays.items()),
        **options,
    )
    if isinstance(case.rule, TrapRule):
        return [finding.message for finding in report.findings]
    report.require_clean()
    return out


class Conformance:
    """One run: the cases on the GPU, one after another, while the engine runs them on all cores; then the comparison.

    `result()` is whole at any time: a case that has not run is recorded as that. `engine` None leaves the comparison
    for a replay. `earlier` is a record whose passing cases are taken over instead of run. `deadline` is of
    time.monotonic(): what has not ended by then is left out. `save` gets the unfinished result now and then, and the
    finished one.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        *,
        engine: dict[str, str] | None,
        earlier: dict[str, Any] | None = None,
        deadline: float = math.inf,
        case_s: float = CASE_SECONDS,
        progress: Callable[[str], None] = lambda _: None,
        save: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._cases = {case.name: case for case in cases}
        self._engine = engine
        self._deadline = deadline
        self._case_s = case_s
        self._say = progress
        self._save = save
        self._saved = time.monotonic()
        self._gpu_identity: dict[str, Any] = {}
        self._records: dict[str, Record] = passed_before(cases, earlier)
        self._to_run = in_order([case for case in cases if case.name not in self._records], earlier)
        self._earlier = earlier
        self._earlier_runs = runs_before(earlier) if earlier and self._records else []

    @property
    def to_run(self) -> Sequence[Case]:
        """The cases that have not passed before, in the order in which they run."""
        return self._to_run

    def result(self) -> dict[str, Any]:
        """The whole record as it stands."""
        never = Outcome("not run", message="no time was left")
        records = [self._records.get(name) or record_of(case, never) for name, case in self._cases.items()]
        passed = [record["passed"] for record in records]
        return {
            "schema": SCHEMA,
            "gpu": self._gpu_identity,
            "engine": self._engine,
            **({"earlier_runs": self._earlier_runs} if self._earlier_runs else {}),
            "passed": False if False in passed else None if None in passed else True,
            "cases": records,
        }

    def run(self, gpu: Gpu, identity: dict[str, Any]) -> dict[str, Any]:
        """The result after all cases ran on `gpu`, and on the engine unless that is left out.

        Raises EmulatorError where `earlier` is of another GPU.
        """
        self._gpu_identity = identity
        if self._earlier is not None:
            require_same_gpu(self._earlier, identity)
            self._say(f"{len(self._records)} cases have passed before and do not run")
        with _Engine(self._to_run if self._engine else ()) as engine:
            try:
                self._run_on_gpu(gpu)
            finally:
                self._save(self.result())
            for case in self._to_run if self._engine else ():
                record = self._records.get(case.name)
                if record and is_comparable(case, record["status"]):
                    self._records[case.name] = self._compared(case, record, engine)
        self._save(self.result())
        return self.result()

    def replay(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """The result from the GPU's outputs in `recorded`. Raises EmulatorError for the record of another kernel."""
        self._gpu_identity = recorded["gpu"]
        self._earlier_runs = recorded.get("earlier_runs", [])
        known = {record["name"]: record for record in recorded["cases"]}
        for name, case in self._cases.items():
            if name not in known:
                raise EmulatorError(f"The record has no case {name!r}. Run the conformance program on a GPU again.")
            require_same_case(case, known[name])
        with _Engine(self._cases.values()) as engine:
            for name, case in self._cases.items():
                try:
                    record = replay(case, known[name], engine.words(case, self._left()))
                except TimeoutError:
                    record = {**known[name], "passed": None}
                except EmulatorError as error:
                    record = broken_engine(known[name], error)
                self._keep(record)
        self._save(self.result())
        return self.result()

    def _run_on_gpu(self, gpu: Gpu) -> None:
        crashed = []
        for case in self._to_run:
            limit = min(self._case_s, self._left())
            if limit <= 0:
                self._say(f"the time is over: {len(self._cases) - len(self._records)} cases have not run")
                return
            try:
                outcome = gpu(case, case.blocks, limit)
            except LaunchError as error:  # no process can use the GPU any more
                outcome = Outcome("not run", message=str(error))
            if outcome.status == "crash" and not isinstance(case.rule, TrapRule):
                crashed.append(case)
            self._keep(record_of(case, outcome))
            if outcome.status == "not run":
                return
        for case in crashed:  # last, since each step costs a new process
            try:
                place = isolate(gpu, case, limit_s=self._case_s, deadline=self._deadline)
            except LaunchError as error:
                self._say(f"no more is known about the cases that crashed: {error}")
                return
            record = self._records[case.name]
            self._keep({**record, "example": record["example"] + place})

    def _compared(self, case: Case, record: Record, engine: _Engine) -> Record:
        try:
            record = compare(case, record, engine.words(case, self._left()))
        except TimeoutError:
            return record
        except EmulatorError as error:
            record = broken_engine(record, error)
        self._say(line_of(record))
        return record

    def _keep(self, record: Record) -> None:
        self._records[record["name"]] = record
        self._say(line_of(record))
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self._save(self.result())
            self._saved = time.monotonic()

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


class _Engine:
    """Cases on the engine, on all cores at once: most of the time is the C++ compiler's."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1)
        self._words: dict[str, Future[Any]] = {c.name: self._threads.submit(run_on_engine, c) for c in cases}

    def words(self, case: Case, limit_s: float) -> Any:
        """The words of `case`. Raises TimeoutError after `limit_s`, and what `run_on_engine` raises."""
        return self._words[case.name].result(timeout=None if math.isinf(limit_s) else limit_s)

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def conform(
    cases: Sequence[Case], *, recorded: dict[str, Any] | None = None, gpu: Gpu | None = None, **options: Any
) -> dict[str, Any]:
    """The whole record: the GPU here, `gpu`, or `recorded` (an earlier record) against the engine, if there is one.

    `options` are those of `Conformance`. Raises MissingComponentError without a GPU and a record, or without a compiler
    and a GPU.
    """
    engine = options.pop("engine") if "engine" in options else _engine_identity(required=recorded is not None)
    conformance = Conformance(cases, engine=engine, **options)
    if recorded is not None:
        return conformance.replay(recorded)
    identity = _gpu_identity()
    if gpu is not None:
        return conformance.run(gpu, identity)
    workers = WorkerGpu(conformance.to_run)
    try:
        return conformance.run(workers, identity)
    finally:
        workers.close()


def _gpu_identity() -> dict[str, Any]:
    from .. import driver
    from ..nvrtc import nvrtc_version

    info = driver.device_info(0)
    major, minor = nvrtc_version()
    cc = f"{info.cc[0]}.{info.cc[1]}"
    return {"name": info.name, "cc": cc, "driver": info.driver_version, "nvrtc": f"{major}.{minor}"}


def _engine_identity(*, required: bool) -> dict[str, str] | None:
    from .build import engine_digest
    from .toolchain import find_toolchain

    try:
        return {"digest": engine_digest(), "compiler": find_toolchain().version}
    except MissingComponentError:
        if required:
            raise
        return None


def _write(path: Path, result: dict[str, Any]) -> None:
    """Replaces the file whole: a run that is killed leaves the last one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flashsmith.runtime.emulator.conformance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--replay", type=Path, help="take the GPU's outputs from this record instead of a GPU")
    parser.add_argument("--new-against", type=Path, metavar="EARLIER", help="run only what has not passed in there")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name contains TEXT")
    parser.add_argument("--gpu-only", action="store_true", help="record the GPU's outputs; compare in a later --replay")
    parser.add_argument("--budget-s", type=float, metavar="S", default=math.inf, help="end after S seconds")
    parser.add_argument("--case-s", type=float, metavar="S", default=CASE_SECONDS, help="seconds a case may take")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; 0 where every case that ran on both sides agrees, 1 otherwise."""
    start = time.monotonic()
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.out is None and chosen.replay is None:
        parser.error("one of --out and --replay is needed")
    if chosen.new_against is not None and chosen.replay is not None:
        parser.error("--new-against is for a run on a GPU, and --replay needs none")
    if chosen.gpu_only and chosen.replay is not None:
        parser.error("--gpu-only leaves out what --replay is for")
    options: dict[str, Any] = {"deadline": start + chosen.budget_s, "case_s": chosen.case_s}
    if chosen.out is not None:
        options["save"] = lambda result: _write(chosen.out, result)
    if chosen.gpu_only:
        options["engine"] = None
    try:
        recorded = json.loads(chosen.replay.read_text()) if chosen.replay else None
        if chosen.new_against is not None:
            options["earlier"] = json.loads(chosen.new_against.read_text())
        cc = (recorded["gpu"] if recorded else _gpu_identity()).get("cc", "")
        cases = [case for case in cases_for(cc) if chosen.only in case.name]
        result = conform(cases, recorded=recorded, progress=lambda line: print(line, flush=True), **options)
    except (FlashsmithError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    failed = [record["name"] for record in result["cases"] if record["passed"] is False]
    missing = sum(record.get("status") == "not run" for record in result["cases"])
    notes = [f"{len(failed)} failed" + (f": {', '.join(failed)}" if failed else "")]
    notes += [f"{missing} not run"] if missing else []
    print(f"{len(result['cases'])} cases in {time.monotonic() - start:.0f} s: {', '.join(notes)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
