"""Values for captured numbers and tensors: large enough for every index, and of the right kind."""
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import pytest
import torch

from flashsmith.generator.language import trace_mask, trace_score
from flashsmith.generator.language.cuda import check_tables
from flashsmith.generator.spec import AttentionSpec, ProblemShape
from flashsmith.runtime.problem import problem_of
from flashsmith.runtime.synthetic import FLOAT, INTEGER, synthetic_problem

SHAPE = ProblemShape(2, 5, 7, 4, 2)


def made(mask=None, score=None, **kwargs):
    spec = AttentionSpec(mask=mask and trace_mask(mask).graph, score=score and trace_score(score).graph)
    problem = synthetic_problem(spec, SHAPE, **kwargs)
    for traced in (problem.mask, problem.score):
        if traced is not None:
            check_tables(traced, batch=2, nheads=4, seqlen_q=5, seqlen_k=7)
    return problem


def test_numbers_by_kind():
    w, f = 5000, 2.0
    problem = made(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < w, lambda s, b, h, q_idx, kv_idx: s * f)
    assert problem.mask.scalars == (INTEGER,) and problem.score.scalars == (FLOAT,)


def test_given_numbers_are_kept():
    given = problem_of(dtype="bf16", head_dim=128, window_size=(4096, -1), softcap=30.0)
    problem = synthetic_problem(given.spec, SHAPE, numbers=given)
    assert problem.mask.scalars == given.mask.scalars and problem.score.scalars == given.score.scalars


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_tables_fit_every_index(dtype, kind):
    table = torch.zeros(1, 1, 1, dtype=getattr(torch, dtype))
    problem = made(score=lambda s, b, h, q_idx, kv_idx: s + table[b, h % 2, q_idx - kv_idx + 6])
    (found,) = problem.tables
    assert found.shape == (2, 2, 11) and found.dtype == kind and torch.isfinite(found).all()


def test_a_table_that_indexes_another():
    pages = torch.zeros(1, dtype=torch.int32)
    bias = torch.zeros(1)
    problem = made(score=lambda s, b, h, q_idx, kv_idx: s + bias[pages[kv_idx // 2] * 2 + kv_idx % 2])
    by_dtype = {table.dtype: table for table in problem.tables}
    assert len(by_dtype[torch.int32]) == 4
    assert len(by_dtype[torch.float32]) > 2 * int(by_dtype[torch.int32].max()) + 1


def test_integer_tables_are_runs_and_bool_tables_mixed():
    ids, seen = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    problem = made(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & seen[kv_idx], seed=3)
    by_dtype = {table.dtype: table for table in problem.tables}
    assert by_dtype[torch.int64].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert by_dtype[torch.bool].any() and not by_dtype[torch.bool].all()
