"""Proves a candidate right on the CPU emulator, in a worker process with a time limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...generator.arch import Arch, arch_from_name
from ...generator.errors import EmulatorError, MissingComponentError, TuneError
from ...generator.families import family_named
from ...generator.families.base import Family, KernelConfig
from .process import WorkerCrashed, WorkerFailed, WorkerProcess, WorkerTimeout
from .request import TuneProblem

HANDLER = "flashsmith.runtime.tune.prover:prove_handler"
#: The first proof on a machine builds the emulator's engine.
PROOF_SECONDS = 240.0


class Prover:
    """Asks a worker whether configs of one problem are right."""

    def __init__(self, problem: TuneProblem, arch: Arch, family: Family, *, handler: str = HANDLER) -> None:
        arguments = {"problem": problem.to_dict(), "arch": arch.name, "family": family.name}
        self._worker = WorkerProcess(handler, arguments)

    def fault(self, config: KernelConfig) -> str:
        """What is wrong with `config`, "" if nothing. Raises EmulatorError where the emulator itself cannot run."""
        try:
            reply = self._worker.request({"config": config.to_dict()}, timeout=PROOF_SECONDS)
        except WorkerTimeout:
            return f"it did not end within {PROOF_SECONDS:.0f} s"
        except WorkerCrashed as error:
            return str(error)
        except WorkerFailed as error:
            if error.kind == "VerifyError":
                return str(error)
            kinds = {"MissingComponentError": MissingComponentError, "EmulatorError": EmulatorError}
            raise kinds.get(error.kind, TuneError)(f"{error}") from None
        return str(reply["fault"])

    def close(self) -> None:
        self._worker.close()


def prove_handler(problem: dict[str, Any], arch: str, family: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The child's function: runs one config's kernel on the emulator against the reference."""
    from ..verify import verify_config

    the_problem = TuneProblem.from_dict(problem).traced()
    the_arch = arch_from_name(arch)
    the_family = family_named(family)

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        config = the_family.config_type.from_dict(message["config"])
        verdict = verify_config(the_problem, config, the_arch, device="emulator")
        return {"fault": "" if verdict.ok else str(verdict)}

    return handle
