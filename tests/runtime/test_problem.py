"""From keyword arguments to a spec."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalSubscript=false

from __future__ import annotations

import math

import numpy
import pytest
import torch

from flashsmith.generator import mods
from flashsmith.generator.errors import SpecError, TraceError
from flashsmith.generator.language import trace_mask, trace_score
from flashsmith.runtime.problem import problem_of, window_of


def problem(**kwargs):
    return problem_of(dtype="bf16", head_dim=64, **kwargs)


def words(**kwargs):
    spec = problem(**kwargs).spec
    return (spec.mask and spec.mask.describe()), (spec.score and spec.score.describe())


def test_nothing_asked_for_is_no_graph():
    assert words() == (None, None)
    assert words(window_size=(None, -1), softcap=0.0) == (None, None)
    assert words(window_size=(-3, -7), softcap=0) == (None, None)


def test_functions_that_do_nothing_are_no_graph():
    nothing = problem().spec
    everything = mods.sliding_window(-1, -1)
    limit = 0
    for mask in (everything, lambda b, h, q_idx, kv_idx: (kv_idx >= 0) | (q_idx < limit)):
        found = problem(mask_mod=mask)
        assert (found.spec, found.mask, found.tables) == (nothing, None, ())
    assert problem(causal=True, mask_mod=everything).spec == problem(causal=True).spec
    found = problem(score_mod=lambda s, b, h, q_idx, kv_idx: s)
    assert (found.spec, found.score) == (nothing, None)
    # A mask that hides everything is one.
    assert problem(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 0).spec.mask is not None


def test_causal_and_its_window_are_one_problem():
    causal = problem(causal=True).spec
    assert problem(window_size=(-1, 0)).spec == causal
    assert problem(causal=True, window_size=(None, 0)).spec == causal
    # A right side beside causal hides nothing more.
    assert problem(causal=True, window_size=(-1, 5)).spec == causal


def test_causal_with_a_left_window_is_one_problem_however_it_is_said():
    said = [
        problem(causal=True, window_size=(3, -1)),
        problem(causal=True, window_size=(3, 9)),
        problem(window_size=(3, 0)),
    ]
    assert len({p.spec for p in said}) == 1
    assert all(p.mask is not None and p.mask.scalars == (3,) for p in said)


def test_zero_is_a_limit():
    mask = problem(window_size=(0, -1)).mask
    assert mask is not None and mask.scalars == (0,)


def test_values_are_arguments_not_part_of_the_spec():
    assert problem(window_size=(3, 4)).spec == problem(window_size=(30, 40)).spec
    assert problem(softcap=10.0).spec == problem(softcap=50.0).spec
    assert problem(softcap=10.0).score.scalars != problem(softcap=50.0).score.scalars


def test_scores_apply_in_the_documented_order():
    slopes = torch.zeros(4)
    _, score = words(softcap=30.0, alibi_slopes=slopes, score_mod=lambda s, b, h, q_idx, kv_idx: s * 2.0 + 7.0)
    assert score.index("tanh") < score.index("slopes") < score.index("7")


def test_masks_are_anded_and_tables_kept_in_slot_order():
    ids = torch.zeros(8, dtype=torch.int32)
    bias = torch.zeros(8)
    found = problem(
        causal=True,
        mask_mod=lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
        score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx],
    )
    assert "&" in found.spec.mask.describe() and "ids" in found.spec.mask.describe()
    assert len(found.tables) == 2 and found.tables[0] is ids and found.tables[1] is bias


def test_traced_functions_are_taken_and_their_kind_checked():
    mask = trace_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    score = trace_score(lambda s, b, h, q_idx, kv_idx: s + 1.0)
    assert problem(mask_mod=mask, score_mod=score).spec.mask == mask.graph
    with pytest.raises(TraceError, match="Swap mask_mod and score_mod"):
        problem(mask_mod=score)
    with pytest.raises(TraceError, match="Swap mask_mod and score_mod"):
        problem(score_mod=mask)


@pytest.mark.parametrize("window", [(1.5, 0), ("3", 0), (True, 0), (1,), (1, 2, 3), 5, None])
def test_a_window_that_is_no_pair_of_integers_is_refused(window):
    with pytest.raises(SpecError, match="window_size must be"):
        window_of(window)


def test_windows_of_every_integer_kind():
    assert window_of([3, None]) == (3, -1)
    assert window_of(torch.tensor([3, -1])) == (3, -1)
    assert window_of((numpy.int64(3), numpy.int32(0))) == (3, 0)
    assert window_of((1 << 40, 2)) == ((1 << 31) - 1, 2)


@pytest.mark.parametrize(
    "cap",
    [-1.0, math.nan, math.inf, "30", True, 1e39, 1e-39, 1e-300, 10**400, 10**5000, torch.tensor(3.0)],
    ids=lambda cap: str(cap) if isinstance(cap, float) else type(cap).__name__,
)
def test_a_wrong_softcap_is_refused(cap):
    with pytest.raises(SpecError, match="softcap must be 0"):
        problem(softcap=cap)


@pytest.mark.parametrize("head_dim", [0, 7, 257, 264])
def test_a_wrong_head_dim_is_refused(head_dim):
    with pytest.raises(SpecError, match="head_dim must be a multiple of 8"):
        problem_of(dtype="bf16", head_dim=head_dim)


@pytest.mark.parametrize("cap", [numpy.float32(3.0), numpy.float16(3.0), numpy.int64(3), 3])
def test_a_softcap_may_be_any_kind_of_number(cap):
    problem = problem_of(dtype="fp16", head_dim=64, softcap=cap)
    assert problem.score is not None and set(problem.score.scalars) == {3.0, float(numpy.float32(1 / 3))}


@pytest.mark.parametrize("cap", [mods.SOFTCAP_MIN, mods.SOFTCAP_MAX])
def test_the_largest_and_the_smallest_softcap_have_normal_inverses(cap):
    scalars = trace_score(mods.softcap(cap)).scalars
    assert all(numpy.finfo(numpy.float32).tiny <= scalar < math.inf for scalar in scalars) and len(scalars) == 2


def test_zero_of_any_kind_is_no_softcap():
    for zero in (0, 0.0, -0.0, None, numpy.float32(0)):
        assert problem_of(dtype="fp16", head_dim=64, softcap=zero).score is None
