"""How good the search and the cost model are, judged on a recorded exhaustive log: no GPU, done in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...generator.errors import TuneError
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import ProblemShape
from .log import Trial, read_trials
from .search import Search

#: Config -> milliseconds, None where it failed. In the order of the space.
Landscape = Mapping[KernelConfig, float | None]


@dataclass(frozen=True, slots=True)
class Replay:
    """One replayed search: the regret (relative to the landscape's best) after each trial, in order, and its faults."""

    regrets: tuple[float, ...]
    duplicates: int
    invalid: int

    def regret_after(self, trials: int) -> float:
        """The regret of the best config found within the first `trials` trials."""
        return self.regrets[min(trials, len(self.regrets)) - 1]


def landscape_of(trials: Iterable[Trial], family: Family, shape: ProblemShape) -> dict[KernelConfig, float | None]:
    """The recorded times at `shape`; of a config recorded twice the last one. Raises TuneError if there are none."""
    found: dict[KernelConfig, float | None] = {}
    for trial in trials:
        if trial.shape == shape:
            found[family.config_type.from_dict(trial.config)] = trial.ms_median if trial.outcome == "ok" else None
    if not any(ms is not None for ms in found.values()):
        raise TuneError(f"The log holds no timed trial of {family.name} at {shape}.")
    return found


def read_landscapes(path: Path, family: Family) -> dict[tuple[str, ProblemShape], dict[KernelConfig, float | None]]:
    """Every landscape in the log at `path`, by the spec's words and the shape."""
    trials = read_trials(path)
    keys = dict.fromkeys((trial.spec, trial.shape) for trial in trials if trial.outcome == "ok")
    return {(spec, shape): landscape_of((t for t in trials if t.spec == spec), family, shape) for spec, shape in keys}


def replay_search(
    landscape: Landscape, *, trials: int, seeds: Sequence[KernelConfig] = (), seed: int = 0, batch: int = 1
) -> Replay:
    """A search of `trials` trials (failed ones not counted) that reads its times from `landscape`."""
    best = min(ms for ms in landscape.values() if ms is not None)
    search = Search(tuple(landscape), seeds=seeds, seed=seed)
    seen: set[KernelConfig] = set()
    duplicates = invalid = 0
    regrets: list[float] = []
    while len(regrets) < trials:
        proposals = search.ask_batch(min(batch, trials - len(regrets)))
        if not proposals:
            break
        for config in proposals:
            duplicates += config in seen
            invalid += config not in landscape
            seen.add(config)
            ms = landscape.get(config)
            search.tell(config, ms)
            if ms is not None:
                found = search.best
                assert found is not None
                regrets.append(found[1] / best - 1)
    return Replay(tuple(regrets), duplicates, invalid)


def rank_correlation(predicted: Mapping[KernelConfig, float], landscape: Landscape) -> float:
    """Spearman's rank correlation of predicted and measured times over the configs that have both."""
    pairs = [(predicted[config], ms) for config, ms in landscape.items() if ms is not None and config in predicted]
    if len(pairs) < 3:
        raise TuneError(f"A rank correlation needs at least 3 configs with both times, but there are {len(pairs)}.")
    return statistics.correlation(_ranks([one for one, _ in pairs]), _ranks([other for _, other in pairs]))


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, equal values sharing their mean rank."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]
