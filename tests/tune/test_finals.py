from __future__ import annotations

from helpers_tune import DEFAULT, SPACE

from flashsmith.runtime.tune.finals import TIE_TOLERANCE, Finalist, decide, noise_between

OTHERS = [config for config in SPACE if config != DEFAULT]


def finalist(config, ms, *, spread=0.0, n=25, smem=1000, registers=100, order=0):
    return Finalist(config, ms, spread, n, smem, registers, order)


def test_the_fastest_beyond_the_noise_wins():
    decision = decide([finalist(OTHERS[0], 0.9), finalist(DEFAULT, 1.0)], DEFAULT)
    assert decision.winner.config == OTHERS[0]
    assert decision.rule == "fastest"
    assert decision.ties == ()


def test_the_default_is_kept_within_the_noise():
    decision = decide([finalist(OTHERS[0], 1.0), finalist(DEFAULT, 1.0 + 0.9 * TIE_TOLERANCE)], DEFAULT)
    assert decision.winner.config == DEFAULT
    assert decision.kept_default
    assert [tie.config for tie in decision.ties] == [OTHERS[0]]


def test_the_default_is_dropped_just_beyond_the_noise():
    decision = decide([finalist(OTHERS[0], 1.0), finalist(DEFAULT, 1.0 + 1.1 * TIE_TOLERANCE)], DEFAULT)
    assert decision.winner.config == OTHERS[0]
    assert not decision.kept_default


def test_a_tie_goes_to_less_shared_memory_then_registers_then_order():
    by_smem = [finalist(OTHERS[0], 1.0, smem=2000), finalist(OTHERS[1], 1.001, smem=1000)]
    assert decide(by_smem, None).winner.config == OTHERS[1]
    by_registers = [finalist(OTHERS[0], 1.0, registers=200), finalist(OTHERS[1], 1.001, registers=100)]
    assert decide(by_registers, None).winner.config == OTHERS[1]
    by_order = [finalist(OTHERS[1], 1.0, order=2), finalist(OTHERS[0], 1.001, order=1)]
    assert decide(by_order, None).winner.config == OTHERS[0]
    assert "tied" in decide(by_order, None).rule


def test_the_tie_is_broken_alike_whichever_was_faster_by_chance():
    for first, second in ((1.0, 1.003), (1.003, 1.0)):
        pair = [finalist(OTHERS[0], first, smem=900), finalist(OTHERS[1], second, smem=1000)]
        assert decide(pair, DEFAULT).winner.config == OTHERS[0]


def test_noisy_medians_widen_the_tie():
    quiet, noisy = finalist(OTHERS[0], 1.0, spread=0.001), finalist(OTHERS[1], 1.02, spread=0.2, n=10)
    assert noise_between(quiet, quiet) == TIE_TOLERANCE
    assert noise_between(quiet, noisy) > 0.02
    assert [tie.config for tie in decide([quiet, noisy], None).ties] == [OTHERS[1]]
