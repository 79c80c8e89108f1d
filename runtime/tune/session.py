"""What tuning runs share: what they are told apart by, the GPU of the cost model, the log, and slow imports."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from ...generator.errors import TuneError
from ...generator.families.base import Family
from ...generator.spec import AttentionSpec
from ..store_schema import Provenance
from ..variables import cache_dir
from .bench_client import Identity
from .gpus import GpuModel, gpu_model
from .log import TrialLog
from .request import TuneRequest

logger = logging.getLogger("flashsmith.tune")


def model_of(request: TuneRequest, identity: Identity) -> GpuModel:
    """The cost model's GPU: the typical one of the architecture with this one's SMs and clock."""
    typical = gpu_model(request.arch)
    device = identity.device
    clock = device.sm_clock_khz / 1e6 or typical.clock_ghz
    return GpuModel(
        device.name, typical.arch, device.sm_count or typical.sm_count, clock, typical.memory_gbps, typical.rates
    )


def session_of(
    request: TuneRequest, spec: AttentionSpec, family: Family, provenance: Provenance, identity: Identity | None
) -> dict[str, Any]:
    """What must be equal for an interrupted run's trials to count in this one."""
    return {
        "problem": request.problem.to_dict() | {"window_size": list(request.problem.window_size)},
        "spec": spec.digest,
        "words": str(spec),
        "arch": request.arch.name,
        "family": family.name,
        "provenance": provenance.to_dict(),
        "device": identity.device.to_dict() if identity is not None else None,
    }


def open_log(path: Path, *, asked: bool) -> TrialLog:
    """The log at `path`; in a temporary folder where that cannot be written, unless it was `asked` for: TuneError."""
    try:
        return TrialLog(path)
    except OSError as error:
        if asked:
            raise TuneError(
                f"The trial log {path} cannot be written: {error.strerror}. Name another one with --log."
            ) from None
        elsewhere = Path(tempfile.mkdtemp(prefix="flashsmith-tune-")) / path.name
        logger.warning("The trial log cannot be kept in %s (%s); it is %s.", path.parent, error.strerror, elsewhere)
        return TrialLog(elsewhere)


def log_path(request: TuneRequest, spec: AttentionSpec, family: Family) -> Path:
    """Where the log of one request lies if nothing else is said."""
    return cache_dir() / "tune" / f"{family.name}-{request.arch}-{spec.dtype}-d{spec.head_dim}-{spec.digest[:12]}.jsonl"


def warm_up() -> None:
    """Imports what the first bucket would wait for: counting tiles takes torch, searching optuna."""
    import optuna  # noqa: F401
    import torch  # noqa: F401
