"""Masks under which rows or warpgroups see nothing of a tile: consumers pass the tiles that the producer loads."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from helpers_hopper_forward import Case, check, config, emulate, problem_and_inputs

SHOWN = (torch.arange(320 * 320).reshape(320, 320) * 7919 % 11 < 5).contiguous()
INVERTED = -200


def shown(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return SHOWN[q_idx, kv_idx]


def behind_a_prefix(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (kv_idx >= 200) & (kv_idx <= q_idx)


def falling(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (kv_idx >= 256) & (kv_idx <= 300 - 2 * q_idx)


def nothing(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (kv_idx <= q_idx) & (q_idx - INVERTED <= kv_idx)


drawing = {"schedule": "dynamic", "q_stages": 2, "softmax": "wary", "pingpong": True}
CASES: Mapping[str, Case] = {
    # The own rows' last key lies before the first one that the whole tile visits.
    "causal behind a hidden prefix": Case(256, 256, config(4, 32), call={"mask_mod": behind_a_prefix}),
    "causal behind a hidden prefix, turns": Case(
        256, 256, config(2, 32, **drawing), call={"mask_mod": behind_a_prefix}, heads=(2, 1)
    ),
    "causal behind a hidden prefix, packed": Case(
        128, 256, config(2, 32, pack_gqa=True), call={"mask_mod": behind_a_prefix}, heads=(2, 1)
    ),
    "the last rows see nothing": Case(128, 320, config(2, 64), call={"mask_mod": falling}),
    "a window turned inside out": Case(250, 250, config(2, 32), call={"mask_mod": nothing}),
    # A mask from memory shows no tile in full, and a window begins behind tile 0.
    "memory and a left window": Case(320, 320, config(2, 32), call={"mask_mod": shown, "window_size": (40, -1)}),
    "memory and a causal window": Case(
        320, 320, config(1, 32, **(drawing | {"pingpong": False})), call={"mask_mod": shown, "window_size": (40, 0)}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tiles_that_some_rows_pass_by(name: str) -> None:
    case = CASES[name]
    problem, q, k, v = problem_and_inputs(case)
    for flavour, schedule in (("plain", "greedy"), ("race", "random")):
        out, lse, report = emulate(case, problem, q, k, v, flavour=flavour, schedule=schedule)
        assert report.clean, report
        check(problem, q, k, v, out=out, lse=lse)


@pytest.mark.parametrize("softmax", ["optimistic", "wary"])
def test_tiles_of_16_keys_end(softmax: str) -> None:
    """A look at some of a row's scores walks over two groups of 8 columns in steps of at least one."""
    case = Case(64, 200, config(1, 16, softmax=softmax))
    problem, q, k, v = problem_and_inputs(case, factor=200.0)
    out, lse, report = emulate(case, problem, q, k, v, time_limit=20)
    assert report.clean, report
    check(problem, q, k, v, out=out, lse=lse)
