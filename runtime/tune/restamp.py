"""Whether a record's kernel is still generated as it was measured; if so, the record may say so.

A record made by another generator counts as stale, though most changes leave most texts alone. Here the kernel of each
record is generated again: where its text has the digest that the record holds (`provenance.kernel`), the measured
number is one of today's kernel, and `provenance.generator` may become today's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

from ...generator.arch import Arch, arch_from_name
from ...generator.environment import generator_digest
from ...generator.errors import FlashsmithError, StoreError
from ...generator.families import family_named
from ...generator.language import Graph
from ...generator.spec import AttentionSpec
from ..store_files import save_records
from ..store_reading import read_file
from ..store_schema import ANY_GPU, Record, SpecClass
from .records import DIGEST_CHARS, kernel_digest
from .request import TuneProblem

State = Literal["fresh", "same", "changed", "unknown"]
#: A graph's kind and its digest, cut as records hold it.
GraphKey = tuple[str, str]

_WINDOWS = ((-1, -1), (1, -1), (-1, 1), (1, 1))


@dataclass(frozen=True, slots=True)
class Stamp:
    """What became of one record's kernel.

    - "fresh": this very generator made it;
    - "same": another one did, and the text is the same;
    - "changed": the text is another, or the config is no longer accepted; `reason` says which;
    - "unknown": it cannot be generated again or compared; `reason` says why.
    """

    record: Record
    family: str
    state: State
    reason: str = ""

    @property
    def remedy(self) -> str:
        """The command that measures the record again, "" where none is needed."""
        return "" if self.state in ("fresh", "same") else tune_command(self.record, self.family)


def restamp(path: Path, *, graphs: Iterable[Graph | None] = ()) -> list[Stamp]:
    """The stamps of the records in the tuned file at `path`, after those that are "same" were given today's digest.

    `graphs` are masks and scores to know beside `known_graphs`. Nothing else of a record changes, and a file without a
    record to change is not written. Raises StoreError where the file cannot be read or written.
    """
    path = path.absolute()
    stamps = stamps_of(path, graphs=graphs)
    same = [stamp.record for stamp in stamps if stamp.state == "same"]
    if same:
        save_records(
            [replace(r, provenance=replace(r.provenance, generator=_generator())) for r in same],
            arch=path.parent.parent.name,
            family=path.stem,
            gpu=path.parent.name,
            root=path.parent.parent.parent,
        )
    return stamps


def stamps_of(path: Path, *, graphs: Iterable[Graph | None] = ()) -> list[Stamp]:
    """The stamp of each record in the tuned file at `path`, in its order; writes nothing. Raises StoreError."""
    file = read_file(path)
    if not file.usable or not path.is_file():
        reason = file.problems[0] if file.problems else "there is no such file"
        raise StoreError(f"{path} must be a file of tuned configs: {reason}.")
    arch = arch_from_name(path.parent.parent.name)
    known = {**known_graphs(), **{_key(graph): graph for graph in graphs if graph is not None}}
    return [_stamp(record, path.stem, arch, known) for record in file.records]


def spec_of(spec_class: SpecClass, known: Mapping[GraphKey, Graph]) -> AttentionSpec | None:
    """The spec of a class whose graphs are among `known`, else None."""
    mask, score = known.get(("mask", spec_class.mask)), known.get(("score", spec_class.score))
    if (spec_class.mask and mask is None) or (spec_class.score and score is None):
        return None
    return AttentionSpec(
        op=spec_class.op,
        dtype=spec_class.dtype,
        head_dim=spec_class.head_dim,
        head_dim_v=spec_class.head_dim_v,
        mask=mask,
        score=score,
        gqa_ratio=spec_class.gqa_ratio or None,
    )


def known_graphs() -> dict[GraphKey, Graph]:
    """(kind, digest as records hold it) -> graph, for every mask and score that the options of a call make."""
    return {key: graph for key, (graph, _) in _by_options().items()}


def tune_command(record: Record, family: str) -> str:
    """The command line that tunes the record's bucket again, with the kernel family it is a record of."""
    spec, shape = record.spec_class, record.bucket
    words = [f"flashsmith tune -d {spec.head_dim}"]
    if spec.head_dim_v != spec.head_dim:
        words.append(f"--head-dim-v {spec.head_dim_v}")
    words.append(f"--dtype {spec.dtype}")
    for kind, digest in (("mask", spec.mask), ("score", spec.score)):
        if digest:
            _, problem = _by_options().get((kind, digest), (None, None))
            words += [f"--{kind}-mod MODULE:FUNCTION"] if problem is None else _flags(problem, record.values or {})
    words.append(f"--seqlens {shape.seqlen_q} --batch {shape.batch} --nheads {shape.nheads}")
    if shape.seqlen_k != shape.seqlen_q:
        words.append(f"--seqlen-k {shape.seqlen_k}")
    if shape.nheads_k != shape.nheads:
        words.append(f"--nheads-k {shape.nheads_k}")
    words.append(f"--family {family}")
    if record.status == "predicted":
        words.append("--predict --arch sm_{}{}".format(*record.device.cc))
        if record.device.name != ANY_GPU:
            words.append(f"--gpu '{record.device.name}'")
    return " ".join(words)


def _stamp(record: Record, family: str, arch: Arch, known: Mapping[GraphKey, Graph]) -> Stamp:
    made = record.provenance
    if not made.kernel:
        return Stamp(record, family, "unknown", "the record does not say which text was measured")
    try:
        spec = spec_of(record.spec_class, known)
        if spec is None:
            return Stamp(record, family, "unknown", "its mask or score is a function that only its author has")
        now = kernel_digest(spec, family_named(family).config_type.from_dict(dict(record.config)), arch)
    except (FlashsmithError, ArithmeticError) as error:
        return Stamp(record, family, "changed", f"it can no longer be generated: {error}")
    if now != made.kernel:
        return Stamp(record, family, "changed", f"the digest of its text was {made.kernel} and is {now}")
    return Stamp(record, family, "fresh" if made.generator == _generator() else "same")


def _generator() -> str:
    return generator_digest()[:DIGEST_CHARS]


def _key(graph: Graph) -> GraphKey:
    return graph.kind, graph.digest[:DIGEST_CHARS]


@cache
def _by_options() -> dict[GraphKey, tuple[Graph, TuneProblem]]:
    """Each graph that options make, with options that make it. Which are set decides, not their values."""
    problems = [TuneProblem(causal=c, window_size=w) for c, w in product((False, True), _WINDOWS)]
    problems += [TuneProblem(softcap=c, alibi=a) for c, a in product((0.0, 1.0), (False, True))]
    found: dict[GraphKey, tuple[Graph, TuneProblem]] = {}
    for problem in problems:
        spec = problem.traced().spec
        for graph in (spec.mask, spec.score):
            if graph is not None:
                found.setdefault(_key(graph), (graph, problem))
    return found


def _flags(problem: TuneProblem, values: Mapping[str, int | float]) -> list[str]:
    """The options of `problem`, with the record's values where it holds them."""
    flags = ["--causal"] if problem.causal else []
    if problem.window_size != (-1, -1):
        sides = zip(("left", "right"), problem.window_size, strict=True)
        flags.append("--window " + ",".join(str(values.get(name, side) if side >= 0 else -1) for name, side in sides))
    if problem.softcap:
        flags.append(f"--softcap {values.get('softcap', problem.softcap)}")
    if problem.alibi:
        flags.append("--alibi")
    return flags
