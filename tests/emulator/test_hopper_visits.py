"""Masks under which rows or warpgroups see nothing of a tile: consumers pass exactly the tiles that the producer loads."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from helpers_hopper_forward import Case, check, config, emulate, problem_and_inputs

SHOWN = (torch.arange(320 * 320).reshape(320, 320) * 7919 % 11 < 5).contiguous()


def shown(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return SHOWN[q_idx, kv_idx]


drawing = {"schedule": "dynamic", "q_stages": 2, "softmax": "wary", "pingpong": True}
CASES: Mapping[str, Case] = {
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
