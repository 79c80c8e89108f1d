"""Holds the engine against a GPU: every primitive, the same kernel text and inputs, the outputs compared.

    python -m flashsmith.runtime.emulator.conformance --out FILE             on a machine with a GPU
    python -m flashsmith.runtime.emulator.conformance --replay FILE          anywhere, with the GPU's recorded outputs

The file is JSON: the GPU, the engine, and per case the rule, the count of words that break it and the worst difference.
It keeps the GPU's outputs (their digest alone where the engine gave the same bits), so that the engine can be held
against them again without the GPU. Without a C++ compiler the GPU's outputs are recorded for a later replay.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...generator.errors import EmulatorError, FlashsmithError, MissingComponentError
from .conformance_hopper import CC, hopper_cases
from .conformance_kernels import ENTRY, Case, all_cases

SCHEMA = 1
Record = dict[str, Any]


def cases_for(cc: str) -> tuple[Case, ...]:
    """The cases that a GPU of compute capability `cc` ("8.0") can run."""
    return (*all_cases(), *(hopper_cases() if cc == CC else ()))


def run_on_engine(case: Case) -> Any:
    """The words that the engine writes for `case`. Raises EmulatorError where the kernel breaks a rule."""
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
    )
    report.require_clean()
    return out


def run_on_gpu(case: Case, *, device: int = 0) -> Any:
    """The words that the GPU writes for `case`. Raises CompileError, LaunchError and MissingComponentError."""
    import numpy as np
    import torch

    from .. import driver
    from ..nvrtc import compile_to_cubin

    major, minor = driver.device_info(device).cc
    cubin = compile_to_cubin(case.text, case.target or f"sm_{major}{minor}", name="conformance.cu").cubin
    with torch.cuda.device(device):
        tensors = {name: torch.from_numpy(array.view(np.int32)).cuda() for name, array in case.arrays.items()}
        tensors["out"] = torch.full((case.blocks * case.items,), -1, dtype=torch.int32, device="cuda")
        packed = case.pack({name: tensor.data_ptr() for name, tensor in tensors.items()}, gpu=True)
        function = driver.load_function(cubin, ENTRY, smem_bytes=case.smem_bytes, device=device)
        stream = torch.cuda.current_stream().cuda_stream
        arguments = (ctypes.c_char * len(packed)).from_buffer_copy(packed)
        driver.launch(function, (case.blocks, 1, 1), case.threads, case.smem_bytes, stream, arguments)
        words = tensors["out"].cpu().numpy().view(np.uint32)
        driver.unload(function)
    return words


def compare(case: Case, gpu: Any, engine: Any) -> Record:
    """The record of one case that ran on both sides."""
    found = case.rule.compare(gpu, engine, case.arrays)
    agreed = found.mismatches == 0
    return {
        **_record_of_gpu(case, gpu, keep_output=not (case.rule.exact and agreed)),
        "passed": agreed,
        "mismatches": found.mismatches,
        "worst": found.worst,
        "unit": found.unit,
        "example": found.example,
    }


def replay(case: Case, recorded: Record, engine: Any) -> Record:
    """The record of `case` again, from the GPU's recorded output. Raises EmulatorError for another kernel's record."""
    if recorded["case_digest"] != case.digest:
        raise EmulatorError(
            f"The recorded output of {case.name!r} must come from the same kernel and inputs, but they have changed"
            " since. Run the conformance program on a GPU again."
        )
    if recorded["gpu_output"] is None:
        if recorded["gpu_digest"] == _digest(case.rule.canonical(engine)):
            return recorded
        return {**recorded, "passed": False, "mismatches": None, "example": "the engine's digest differs"}
    return compare(case, _decode(recorded["gpu_output"]), engine)


def conform(
    cases: Sequence[Case], *, recorded: dict[str, Any] | None = None, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The whole record: the GPU here (or `recorded`, an earlier record) against the engine.

    Raises MissingComponentError without a GPU and a record, or without a compiler and a GPU.
    """
    say = progress or (lambda _: None)
    engine_identity = _engine_identity(required=recorded is not None)
    records = []
    known = {record["name"]: record for record in recorded["cases"]} if recorded else {}
    for case in cases:
        engine = run_on_engine(case) if engine_identity else None
        if recorded is None:
            try:
                gpu = run_on_gpu(case)
            except (RuntimeError, FlashsmithError) as error:  # the context is lost, and every later case with it
                records.append({**_record_of_nothing(case), "passed": False, "example": f"the GPU failed: {error}"})
                say(f"FAIL     {case.name:44} the GPU failed, and no further case can run: {error}")
                break
            record = compare(case, gpu, engine) if engine is not None else _record_of_gpu(case, gpu, keep_output=True)
        elif case.name in known:
            record = replay(case, known[case.name], engine)
        else:
            raise EmulatorError(f"The record has no case {case.name!r}. Run the conformance program on a GPU again.")
        records.append(record)
        verdict = {True: "pass", False: "FAIL", None: "recorded"}[record["passed"]]
        worst = "" if record["worst"] is None else f"  worst {record['worst']:.3g} {record['unit']}"
        say(f"{verdict:8} {case.name:44} {record['words']:6} words{worst}  {record['example']}")
    passed = [record["passed"] for record in records]
    return {
        "schema": SCHEMA,
        "gpu": recorded["gpu"] if recorded else _gpu_identity(),
        "engine": engine_identity,
        "passed": None if None in passed else all(passed),
        "cases": records,
    }


def _record_of_nothing(case: Case) -> Record:
    return {
        "name": case.name,
        "note": case.note,
        "rule": case.rule.text,
        "words": 0,
        "passed": None,
        "mismatches": None,
        "worst": None,
        "unit": "",
        "example": "",
        "case_digest": case.digest,
        "gpu_digest": "",
        "gpu_output": None,
    }


def _record_of_gpu(case: Case, gpu: Any, *, keep_output: bool) -> Record:
    return {
        **_record_of_nothing(case),
        "words": int(gpu.size),
        "gpu_digest": _digest(case.rule.canonical(gpu)),
        "gpu_output": _encode(gpu) if keep_output else None,
    }


def _digest(words: Any) -> str:
    return hashlib.sha256(words.tobytes()).hexdigest()


def _encode(words: Any) -> str:
    return base64.b64encode(zlib.compress(words.tobytes(), 9)).decode()


def _decode(text: str) -> Any:
    import numpy as np

    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint32)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; 0 where every case that ran on both sides agrees, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m flashsmith.runtime.emulator.conformance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--replay", type=Path, help="take the GPU's outputs from this record instead of a GPU")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name contains TEXT")
    chosen = parser.parse_args(arguments)
    if chosen.out is None and chosen.replay is None:
        parser.error("one of --out and --replay is needed")
    try:
        recorded = json.loads(chosen.replay.read_text()) if chosen.replay else None
        cc = (recorded["gpu"] if recorded else _gpu_identity()).get("cc", "")
        cases = [case for case in cases_for(cc) if chosen.only in case.name]
        result = conform(cases, recorded=recorded, progress=print)
    except (FlashsmithError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    failed = [record["name"] for record in result["cases"] if record["passed"] is False]
    print(f"{len(result['cases'])} cases, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
