"""The emitted CUDA text, compiled for the host, against plain Python: masks, key ranges, tile classes and scores."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
from helpers_language import HostMods, MaskWriter

from flashsmith.generator import mods
from flashsmith.generator.language import and_masks, seqlen_k, seqlen_q, trace_mask, trace_score
from flashsmith.generator.language.bounds import kv_bounds
from flashsmith.generator.language.evaluate import evaluate
from flashsmith.generator.language.interval import classify_tile

B, H, ROWS, KEYS = 1, 2, 9, 21
NHEADS = 3
CLASSES = ("empty", "mixed", "full")
#: Row blocks and key tiles, (first, last) inclusive, aligned and not.
ROW_BLOCKS = [(0, 8), (0, 3), (4, 7), (8, 8), (2, 5), (3, 3)]
KEY_TILES = [(0, 20), (0, 7), (8, 15), (16, 20), (5, 5), (3, 11), (20, 20)]


def check_ranges(seen: np.ndarray, ends: tuple[int, ...], first: int, last: int) -> None:
    """`ends` holds every visible key, and its full part nothing else."""
    begin, end, full_begin, full_end = ends
    assert 0 <= begin <= end <= seen.shape[1]
    assert full_begin <= full_end
    rows = seen[first : last + 1]
    outside = np.ones(seen.shape[1], dtype=bool)
    outside[begin:end] = False
    assert not rows[:, outside].any()
    assert rows[:, full_begin:full_end].all()
    if full_begin < full_end:
        assert begin <= full_begin and full_end <= end


@pytest.mark.parametrize("large", [False, True])
def test_random_masks(large: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    masks = [MaskWriter(Random(seed), large=large).mask() for seed in range(120)]
    traced = [trace_mask(mask.function()) for mask in masks]
    host = HostMods([(t, None) for t in traced], tmp_path)
    decided = 0
    for i, (mask, one) in enumerate(zip(masks, traced, strict=True)):
        oracle = mask.oracle(ROWS, KEYS, NHEADS)
        expected = np.array([[oracle(B, H, q, k) for k in range(KEYS)] for q in range(ROWS)])
        args = host.pack(i, seqlen_q=ROWS, seqlen_k=KEYS, nheads=NHEADS)
        np.testing.assert_array_equal(host.seen(i, args, B, H, ROWS, KEYS), expected, err_msg=mask.traced)
        for first, last in ROW_BLOCKS:
            ends = host.kv_range(i, args, B, H, first, last)
            check_ranges(expected, ends, first, last)
            same = kv_bounds(one.graph).values(
                b=B, h=H, q=(first, last), seqlen_q=ROWS, seqlen_k=KEYS, nheads=NHEADS,
                scalars=one.scalars, tables=one.tables,
            )  # fmt: skip
            assert ends == same, mask.traced
            for tile in KEY_TILES:
                found = host.classify(i, args, B, H, (first, last), tile)
                part = expected[first : last + 1, tile[0] : tile[1] + 1]
                assert found != 0 or not part.any(), mask.traced
                assert found != 2 or part.all(), mask.traced
                python = classify_tile(
                    one.graph, b=B, h=H, q=(first, last), kv=tile, seqlen_q=ROWS, seqlen_k=KEYS, nheads=NHEADS,
                    scalars=one.scalars, tables=one.tables,
                )  # fmt: skip
                assert found in (-1, CLASSES.index(python))
                decided += found in (0, 2)
    assert decided > 1000  # the classes are not all "mixed"
    assert "runtime error" not in capfd.readouterr().err
