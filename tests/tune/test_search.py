from __future__ import annotations

import statistics

import pytest
from helpers_tune import DEFAULT, SPACE, valley

from flashsmith.runtime.tune.replay import replay_search
from flashsmith.runtime.tune.search import Search, escape_lane


@pytest.fixture(scope="module")
def landscape():
    return valley()


def test_seeds_come_first_in_their_order_and_once():
    search = Search(SPACE, seeds=[SPACE[3], DEFAULT, SPACE[3]])
    assert [search.ask(), search.ask()] == [SPACE[3], DEFAULT]
    assert search.ask() not in (SPACE[3], DEFAULT)


def test_a_seed_outside_the_space_is_not_proposed():
    search = Search(SPACE[:5], seeds=[SPACE[9]])
    assert search.ask() in SPACE[:5]


def test_every_config_is_proposed_exactly_once_then_none():
    space = SPACE[:40]
    search = Search(space)
    proposed = []
    while (config := search.ask()) is not None:
        proposed.append(config)
        search.tell(config, float(len(proposed)))
    assert sorted(proposed) == sorted(space)
    assert search.ask() is None


def test_a_batch_holds_no_config_twice():
    search = Search(SPACE)
    batch = search.ask_batch(50)
    assert len(set(batch)) == 50


def test_told_results_are_not_proposed_again():
    search = Search(SPACE[:3])
    search.tell(SPACE[0], 1.0)
    search.tell(SPACE[1], None)
    assert search.ask_batch(5) == [SPACE[2]]
    assert search.best == (SPACE[0], 1.0)


def test_a_space_without_choice_and_an_empty_one():
    assert Search(SPACE[:1]).ask_batch(3) == [SPACE[0]]
    assert Search(()).ask() is None


def test_failures_everywhere_leave_no_best():
    search = Search(SPACE[:8])
    while (config := search.ask()) is not None:
        search.tell(config, None)
    assert search.best is None
    assert search.ranking() == []


def test_the_same_inputs_give_the_same_proposals(landscape):
    runs = [replay_search(landscape, trials=30, seed=5).regrets for _ in range(2)]
    assert runs[0] == runs[1]


def test_equal_times_rank_in_the_order_of_the_space():
    search = Search(SPACE[:3])
    for config in reversed(SPACE[:3]):
        search.tell(config, 1.0)
    assert [config for config, _ in search.ranking()] == list(SPACE[:3])


def test_the_search_finds_the_valley_without_faults(landscape):
    replays = [replay_search(landscape, trials=60, seeds=[DEFAULT], seed=seed, batch=8) for seed in range(12)]
    assert sum(replay.duplicates + replay.invalid for replay in replays) == 0
    assert statistics.median(replay.regret_after(30) for replay in replays) <= 0.02
    assert statistics.median(replay.regret_after(60) for replay in replays) <= 0.005


def test_it_beats_random_search(landscape):
    best = min(ms for ms in landscape.values() if ms is not None)
    random_regrets = []
    for seed in range(12):
        picks = [landscape[config] for config in escape_lane(list(landscape), 33, seed)]
        random_regrets.append(min(ms for ms in picks if ms is not None) / best - 1)
    ours = [replay_search(landscape, trials=30, seed=seed).regret_after(30) for seed in range(12)]
    assert statistics.median(ours) < 0.5 * statistics.median(random_regrets)


def test_escape_lane_is_seeded_and_bounded():
    assert escape_lane(SPACE, 4, 1) == escape_lane(SPACE, 4, 1) != escape_lane(SPACE, 4, 2)
    assert sorted(escape_lane(SPACE[:3], 9, 0)) == sorted(SPACE[:3])
