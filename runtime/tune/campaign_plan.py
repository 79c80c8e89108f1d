"""What a campaign intends to do with one spec: its sizes, which of them it explores, and the configs it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from ...generator.families import choose_family
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec, ProblemShape
from .compile_ahead import SpecToCompile
from .gpus import GpuModel
from .neighbours import nearest_winners, stored_winners
from .request import TuneRequest
from .search import escape_lane
from .seeds import diverse, rank_by_model, stored_configs
from .tiles import TileCounter

#: Seeds by the cost model at each explored size, of other specs' stored winners, and drawn from the whole space.
MODEL_TOP = 8
OTHERS = 2
ESCAPE = 2


@dataclass
class Plan:
    """One spec of a campaign. `explore` is how many configs its search may time at each of the `explored` sizes."""

    request: TuneRequest
    spec: AttentionSpec
    family: Family
    space: tuple[KernelConfig, ...]
    place: int
    explore: int
    explored: tuple[ProblemShape, ...]
    seeds: list[KernelConfig] = field(default_factory=list)
    _tiles: dict[ProblemShape, TileCounter] = field(default_factory=dict)

    @property
    def what(self) -> SpecToCompile:
        return SpecToCompile(self.spec, self.family, self.place)

    def tiles_of(self, shape: ProblemShape) -> TileCounter:
        """The tile counter of one size, made once."""
        return self._tiles.setdefault(shape, TileCounter(self.request.problem, shape))

    def find_seeds(self, gpu: GpuModel, device_name: str | None) -> list[KernelConfig]:
        """Sets `seeds`, the most trusted first: stored winners, the model's best, winners of other specs, and an escape
        from all of these."""
        request, family, spec, arch = self.request, self.family, self.spec, self.request.arch
        ranked = []
        stored: list[KernelConfig] = []
        for shape in self.explored:
            found = rank_by_model(
                family, spec, self.space, arch=arch, gpu=gpu, shape=shape, tiles=self.tiles_of(shape)
            )  # fmt: skip
            ranked.append(diverse([config for config, _ in found], MODEL_TOP))
            stored += stored_configs(
                family, spec, arch=arch, device_name=device_name, shape=shape, user=request.root
            )  # fmt: skip
        others = nearest_winners(
            stored_winners(family, arch, root=request.root),
            spec,
            self.explored,
            family=family,
            arch=arch,
            count=OTHERS,
        )
        best = [config for config in chain.from_iterable(zip_longest(*ranked)) if config is not None]
        self.seeds = list(
            dict.fromkeys(
                [*stored, *best[:4], *others, *best[4:], *escape_lane(self.space, ESCAPE, request.seed)]
            )
        )  # fmt: skip
        return self.seeds


def plan_of(request: TuneRequest, *, place: int, explore: int) -> Plan:
    """The plan of one request, without seeds. Raises UnsupportedError where no family does its spec."""
    spec = request.problem.traced().spec
    family = choose_family(spec, request.arch, name=request.family or "").family
    return Plan(
        request=request,
        spec=spec,
        family=family,
        space=family.space(spec, request.arch),
        place=place,
        explore=explore,
        explored=explored_shapes(request.shapes),
    )


def explored_shapes(shapes: Sequence[ProblemShape]) -> tuple[ProblemShape, ...]:
    """A short and a long one of the sizes with the first one's ratio of heads.

    The second shortest and the second longest of four or more, which are nearer to the others; else the very ends.
    """
    first = shapes[0].gqa_ratio
    ordered = sorted(
        (shape for shape in dict.fromkeys(shapes) if shape.gqa_ratio == first),
        key=lambda shape: (shape.seqlen_q * shape.seqlen_k, shape),
    )
    inset = 1 if len(ordered) >= 4 else 0
    return tuple(dict.fromkeys((ordered[inset], ordered[-1 - inset])))
