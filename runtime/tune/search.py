"""The search over one enumerated space: seeds first, then Optuna's TPE and the neighbours of the best.

Every proposal is projected to the nearest valid config that was not proposed before, so no trial is invalid and none is
a duplicate, and the search ends when the space does. The same space, seeds and results give the same proposals.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...generator.families.base import KernelConfig

if TYPE_CHECKING:
    import numpy as np
    import optuna

#: Every this many proposals, one is the nearest unseen neighbour of the best config so far.
NEIGHBOUR_EVERY = 3
#: A failed config is told to the sampler as this many times the worst time seen: stay away, but keep finite.
FAILURE_FACTOR = 2.0
#: Steps that a differing choice (not a number) counts in the distance, on the scale where a number's range is 1.
CHOICE_DISTANCE = 0.5


class Search:
    """Ask for a config, time it, tell the result. `space` is the enumerated valid set; `seeds` are proposed first.

    `ask` returns None once the whole space was proposed. `tell(config, None)` says that the config failed.
    """

    def __init__(self, space: Sequence[KernelConfig], *, seeds: Iterable[KernelConfig] = (), seed: int = 0) -> None:
        import numpy as np

        self.space = tuple(dict.fromkeys(space))
        self._index = {config: position for position, config in enumerate(self.space)}
        self._axes = _axes_of(self.space)
        self._points = np.array([[axis.position(config) for axis in self._axes] for config in self.space], dtype=float)
        self._points = self._points.reshape(len(self.space), len(self._axes))
        self._unseen = np.ones(len(self.space), dtype=bool)
        self._queue = [config for config in dict.fromkeys(seeds) if config in self._index]
        self._results: dict[KernelConfig, float | None] = {}
        self._asked = 0
        self._study = _new_study(seed)

    @property
    def best(self) -> tuple[KernelConfig, float] | None:
        """The fastest config told so far and its time."""
        timed = [(ms, self._index[config], config) for config, ms in self._results.items() if ms is not None]
        return (min(timed)[2], min(timed)[0]) if timed else None

    @property
    def remaining(self) -> int:
        """How many configs were never proposed."""
        return int(self._unseen.sum())

    def ranking(self) -> list[tuple[KernelConfig, float]]:
        """Every timed config, fastest first; equal times in the order of the space."""
        timed = [(ms, self._index[config], config) for config, ms in self._results.items() if ms is not None]
        return [(config, ms) for ms, _, config in sorted(timed)]

    def ask(self) -> KernelConfig | None:
        """The next config to try, never one that was asked or told before; None when there is none left."""
        if not self.remaining:
            return None
        while self._queue:
            config = self._queue.pop(0)
            if self._unseen[self._index[config]]:
                return self._take(self._index[config])
        self._asked += 1
        best = self.best
        if best is not None and self._asked % NEIGHBOUR_EVERY == 0:
            return self._take(self._nearest_unseen(self._points[self._index[best[0]]]))
        return self._take(self._nearest_unseen(self._sample()))

    def ask_batch(self, count: int) -> list[KernelConfig]:
        """Up to `count` proposals at once."""
        batch = [self.ask() for _ in range(count)]
        return [config for config in batch if config is not None]

    def tell(self, config: KernelConfig, ms: float | None) -> None:
        """Records the result of `config`: milliseconds, or None for a failure. It counts as proposed from now on."""
        import optuna

        position = self._index.get(config)
        if position is None or config in self._results:
            return
        self._unseen[position] = False
        self._results[config] = ms
        worst = max((value for value in self._results.values() if value is not None), default=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.add_trial(
                optuna.trial.create_trial(
                    params={axis.name: axis.position(config) for axis in self._axes},
                    distributions=self._distributions(),
                    value=math.log(ms if ms is not None else FAILURE_FACTOR * worst),
                )
            )

    def _take(self, position: int) -> KernelConfig:
        self._unseen[position] = False
        return self.space[position]

    def _sample(self) -> np.ndarray[Any, Any]:
        """A point from TPE; the trial it came from is closed at once, for the projected config is what gets told."""
        import numpy as np
        import optuna

        trial = self._study.ask(self._distributions())
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return np.array([float(trial.params[axis.name]) for axis in self._axes])

    def _distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        return {
            axis.name: IntDistribution(0, axis.size - 1) if axis.ordered else CategoricalDistribution(range(axis.size))
            for axis in self._axes
        }

    def _nearest_unseen(self, point: np.ndarray[Any, Any]) -> int:
        """The position of the unseen config nearest to `point`; ties go to the first in the order of the space."""
        import numpy as np

        steps = np.abs(self._points - point)
        for column, axis in enumerate(self._axes):
            if axis.ordered:
                steps[:, column] /= axis.size - 1
            else:
                steps[:, column] = CHOICE_DISTANCE * (steps[:, column] > 0)
        distance = steps.sum(axis=1)
        distance[~self._unseen] = np.inf
        return int(np.argmin(distance))


def escape_lane(space: Sequence[KernelConfig], count: int, seed: int) -> list[KernelConfig]:
    """`count` configs drawn from the whole space, so that no ranking can hide a good one from the search."""
    return random.Random(seed).sample(list(space), min(count, len(space)))


class _Axis:
    """One field of the config that varies in the space, as positions 0, 1, ... of its values."""

    def __init__(self, name: str, values: Sequence[int | bool | str]) -> None:
        self.name = name
        self.ordered = all(type(value) is int for value in values)
        self._positions = {value: i for i, value in enumerate(sorted(values) if self.ordered else values)}
        self.size = len(values)

    def position(self, config: KernelConfig) -> int:
        return self._positions[getattr(config, self.name)]


def _axes_of(space: Sequence[KernelConfig]) -> tuple[_Axis, ...]:
    if not space:
        return ()
    columns = {name: list(dict.fromkeys(getattr(c, name) for c in space)) for name in space[0].to_dict()}
    return tuple(_Axis(name, values) for name, values in columns.items() if len(values) > 1)


def _new_study(seed: int) -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=8))
