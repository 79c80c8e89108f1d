"""What the parts of one measured tuning run share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec
from ..store_schema import Provenance
from .bench_client import Bench, Identity, Timed
from .compile_pool import Compiled
from .gpus import GpuModel
from .log import TrialLog
from .request import ProgressFunction, TuneRequest


class Pool(Protocol):
    """What compiles a job's candidates: one spec's part of a `CompileAhead`."""

    @property
    def results(self) -> dict[KernelConfig, Compiled]: ...
    def submit(self, configs: Sequence[KernelConfig]) -> None: ...
    def compile(self, configs: Sequence[KernelConfig]) -> Iterator[Compiled]: ...


@dataclass
class Job:
    """What the buckets of one measured request share."""

    request: TuneRequest
    spec: AttentionSpec
    family: Family
    space: tuple[KernelConfig, ...]
    pool: Pool
    bench: Bench
    log: TrialLog
    identity: Identity
    provenance: Provenance
    gpu: GpuModel
    progress: ProgressFunction
    #: The config that a call without a record would use; always takes part.
    default: KernelConfig
    #: Configs found wrong, crashing or hanging at any shape: never tried again in this run.
    poisoned: dict[KernelConfig, str] = field(default_factory=dict)
    verified: dict[KernelConfig, Timed] = field(default_factory=dict)
    #: Digests of the kernels' texts, as in a record's provenance.
    digests: dict[KernelConfig, str] = field(default_factory=dict)
    #: Each config's place in the space.
    order: dict[KernelConfig, int] = field(init=False)

    def __post_init__(self) -> None:
        self.order = {config: position for position, config in enumerate(self.space)}
