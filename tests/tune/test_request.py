from __future__ import annotations

import json

import pytest

from flashsmith.generator.errors import TraceError
from flashsmith.runtime.tune.request import TuneProblem, named_function, usual_shape


def test_a_problem_travels_as_json():
    problem = TuneProblem(dtype="fp16", head_dim=96, causal=True, window_size=(64, 0), softcap=30.0, alibi=True)
    again = TuneProblem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert again == problem
    assert again.traced(nheads=4).spec.digest == problem.traced(nheads=8).spec.digest


def test_its_spec_is_the_one_that_a_call_has():
    from flashsmith.runtime.problem import problem_of

    problem = TuneProblem(head_dim=64, causal=True, softcap=20.0)
    same = problem_of(dtype="bf16", head_dim=64, causal=True, softcap=50.0)
    assert problem.traced().spec == same.spec


def test_alibi_slopes_fit_the_heads():
    (slopes,) = TuneProblem(alibi=True).traced(nheads=8).tables
    assert slopes.tolist() == [2.0**-h for h in range(1, 9)]


def test_the_usual_shape_fills_what_is_not_said():
    assert str(usual_shape(1024, head_dim=128)) == "B16 N1024 H16"
    assert str(usual_shape(65536, head_dim=256)) == "B1 N65536 H8"
    assert str(usual_shape(128, head_dim=64, seqlen_k=512, batch=2, nheads=8, nheads_k=2)) == "B2 N128 M512 H8/2"


def test_functions_are_loaded_by_name(tmp_path):
    (tmp_path / "mods.py").write_text("def near(b, h, q_idx, kv_idx):\n    return kv_idx >= q_idx\nvalue = 3\n")
    assert named_function(f"{tmp_path}/mods.py:near").__name__ == "near"
    assert named_function("flashsmith.generator.mods:causal").__name__ == "causal"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("mods.py", "module:function"),
        (":x", "module:function"),
        ("a:b c", "module:function"),
        ("no_such_module_here:f", "cannot be loaded"),
        ("missing.py:f", "there is no file"),
        ("flashsmith.generator.mods:nothing", "cannot be loaded"),
        ("flashsmith:__version__", "must be a function"),
    ],
)
def test_a_wrong_name_is_a_clear_error(reference, words):
    with pytest.raises(TraceError, match=words):
        named_function(reference)
