"""Values for a spec's captured numbers and tensors, to run a kernel whose own values are elsewhere or too large."""

from __future__ import annotations

from typing import Any

import torch

from ..generator.language import Graph, Traced
from ..generator.language.graph import ScalarSlot, TableSlot
from ..generator.spec import AttentionSpec, ProblemShape
from .problem import Problem
from .reference import Sizes, evaluate
from .tensors import torch_dtype

#: Captured integers are limits, mostly: this cuts through tiles and sequences of a verification.
INTEGER = 37
#: Captured floats are factors, mostly.
FLOAT = 0.75
#: Captured float tensors are biases and slopes: normal with this spread, so that a slope times a length stays moderate.
FLOAT_SPREAD = 0.1
#: Captured integer tensors name documents or small choices: runs of equal values 0, 1, 2.
CHOICES = 3


def synthetic_problem(
    spec: AttentionSpec,
    shape: ProblemShape,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    numbers: Problem | None = None,
) -> Problem:
    """`spec` with values for all that its graphs capture: numbers from `numbers` where given, tensors as large as the
    largest index that a call of `shape` reads them with.
    """
    generator = torch.Generator().manual_seed(seed)
    given_mask = None if numbers is None else numbers.mask
    given_score = None if numbers is None else numbers.score
    return Problem(
        spec,
        _values(spec.mask, given_mask, shape, torch.device(device), generator),
        _values(spec.score, given_score, shape, torch.device(device), generator),
    )


def _values(
    graph: Graph | None,
    given: Traced | None,
    shape: ProblemShape,
    device: torch.device,
    generator: torch.Generator,
) -> Traced | None:
    if graph is None:
        return None
    scalars = given.scalars if given is not None else tuple(_number(slot) for slot in graph.scalars)
    return Traced(graph, scalars, _tables(graph, scalars, shape, device, generator))


def _number(slot: ScalarSlot) -> int | float:
    return FLOAT if slot.dtype == "fp32" else INTEGER


def _tables(
    graph: Graph, scalars: tuple[Any, ...], shape: ProblemShape, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Tables of the sizes that evaluating the graph asks for; one inside another's index exists by then."""
    needs: dict[TableSlot, list[int]] = {slot: [1] * slot.ndim for slot in graph.tables}

    def measure(slot: TableSlot, indices: Any) -> torch.Tensor:
        for axis, index in enumerate(indices):
            needs[slot][axis] = max(needs[slot][axis], int(index.max()) + 1)
        like = indices[0] if len(indices) else torch.zeros((), dtype=torch.int64)
        if slot.dtype in ("int32", "int64", "uint8"):
            # The largest value that such a table will hold, so that what it indexes is large enough.
            return torch.full_like(like, CHOICES - 1)
        return torch.ones_like(like, dtype=torch.bool if slot.dtype == "bool" else torch.float64)

    if graph.tables:
        leaves = {
            "b": torch.arange(shape.batch).view(-1, 1, 1, 1),
            "h": torch.arange(shape.nheads).view(1, -1, 1, 1),
            "q_idx": torch.arange(shape.seqlen_q).view(1, 1, -1, 1),
            "kv_idx": torch.arange(shape.seqlen_k).view(1, 1, 1, -1),
            "score": torch.zeros((), dtype=torch.float64),
        }
        sizes = Sizes(shape.seqlen_q, shape.seqlen_k, shape.nheads)
        empty = 0 in (shape.batch, shape.nheads, shape.seqlen_q, shape.seqlen_k)
        if not empty:
            evaluate(graph, leaves, sizes, scalars=scalars, load=measure)
    return tuple(_table(slot, needs[slot], device, generator) for slot in graph.tables)


def _table(slot: TableSlot, sizes: list[int], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    if slot.dtype == "bool":
        return (torch.rand(*sizes, generator=generator) < 0.7).to(device)
    if slot.dtype in ("int32", "int64", "uint8"):
        dtype = {"int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8}[slot.dtype]
        last = sizes[-1] if sizes else 1
        runs = torch.arange(last) * CHOICES // max(last, 1)
        return runs.expand(*sizes).contiguous().to(device=device, dtype=dtype)
    values = FLOAT_SPREAD * torch.randn(*sizes, generator=generator)
    return values.to(device=device, dtype=torch_dtype(slot.dtype))
