from __future__ import annotations

import pytest

from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.tune.request import TuneProblem
from flashsmith.runtime.tune.tiles import TileCounter


def counted(problem, n, m, B_r, B_c):
    """The tiles by looking at every pair."""
    visible = []
    for first in range(0, n, B_r):
        count = 0
        for kv in range(0, m, B_c):
            pairs = ((q, k) for q in range(first, min(first + B_r, n)) for k in range(kv, min(kv + B_c, m)))
            count += any(_sees(problem, q + m - n, k) for q, k in pairs)
        visible.append(count)
    return tuple(visible)


def _sees(problem, position, key):
    left, right = problem.window_size
    if problem.causal and key > position:
        return False
    return (left < 0 or key >= position - left) and (right < 0 or key <= position + right)


@pytest.mark.parametrize(
    "problem",
    [
        TuneProblem(),
        TuneProblem(causal=True),
        TuneProblem(window_size=(40, 0)),
        TuneProblem(window_size=(20, 30)),
        TuneProblem(causal=True, window_size=(64, -1)),
    ],
)
@pytest.mark.parametrize(("n", "m"), [(160, 160), (100, 230), (230, 100), (1, 130)])
@pytest.mark.parametrize(("B_r", "B_c"), [(32, 16), (64, 48), (128, 64)])
def test_tiles_are_those_that_hold_a_visible_pair(problem, n, m, B_r, B_c):
    shape = ProblemShape(1, n, m, 1, 1)
    assert TileCounter(problem, shape).visited(B_r, B_c) == counted(problem, n, m, B_r, B_c)


@pytest.mark.parametrize(
    ("problem", "n", "share"),
    [
        (TuneProblem(), 512, 1.0),
        # Blocks of 256 rows see 4 and 8 tiles of 64 keys; of their 64-row parts, 1 to 4 and 5 to 8.
        (TuneProblem(causal=True), 512, (10 + 26) / (4 * 12)),
        # Past the first rows, 64 of them see 2 tiles of a window of 64 keys, a block of 256 sees 5.
        (TuneProblem(window_size=(63, 0)), 512, (1 + 7 * 2) / (4 * (4 + 5))),
        # 64 rows more than a block: the parts beyond the sequence skip everything.
        (TuneProblem(causal=True), 320, (10 + 5) / (4 * (4 + 5))),
    ],
)
def test_parts_of_a_block_skip_what_their_own_rows_do_not_see(problem, n, share):
    counter = TileCounter(problem, ProblemShape(1, n, n, 1, 1))
    assert counter.own_share(256, 64, 64) == pytest.approx(share)
    assert TileCounter(problem, ProblemShape(1, n, 0, 1, 1)).own_share(256, 64, 64) == 1.0


@pytest.mark.parametrize("n", [32768, 65536])
def test_tiles_that_are_no_multiple_of_a_square_are_counted_close_too(n):
    counter = TileCounter(TuneProblem(causal=True), ProblemShape(1, n, n, 1, 1))
    for B_c in (48, 80, 112, 128):
        tiles = counter.visited(128, B_c)
        assert sum(tiles) == pytest.approx(len(tiles) * n / B_c / 2, rel=0.02)


def test_long_calls_are_counted_fast_and_close():
    import time

    started = time.perf_counter()
    counter = TileCounter(TuneProblem(causal=True), ProblemShape(1, 65536, 65536, 1, 1))
    tiles = counter.visited(128, 32)
    assert time.perf_counter() - started < 5
    assert len(tiles) == 512
    assert sum(tiles) == pytest.approx(512 * 2048 / 2, rel=0.02)


def test_flops_follow_the_usual_count():
    spec = TuneProblem(causal=True).traced().spec
    shape = ProblemShape(2, 1024, 1024, 4, 4)
    assert TileCounter(TuneProblem(), shape).flops(spec) == 4 * 2 * 4 * 1024 * 1024 * 128
    assert TileCounter(TuneProblem(causal=True), shape).flops(spec) == 2 * 2 * 4 * 1024 * 1024 * 128


def test_a_mask_function_is_sampled(tmp_path):
    (tmp_path / "mods.py").write_text("def half(b, h, q_idx, kv_idx):\n    return kv_idx < 512\n")
    problem = TuneProblem(mask_mod=f"{tmp_path}/mods.py:half")
    counter = TileCounter(problem, ProblemShape(1, 1024, 1024, 1, 1))
    assert counter.visible_share() == pytest.approx(0.5)
    assert counter.visited(128, 64) == (8,) * 8


def test_a_call_without_keys_or_rows():
    assert TileCounter(TuneProblem(causal=True), ProblemShape(1, 64, 0, 1, 1)).visited(32, 32) == (0, 0)
    assert TileCounter(TuneProblem(causal=True), ProblemShape(1, 0, 64, 1, 1)).visited(32, 32) == ()
