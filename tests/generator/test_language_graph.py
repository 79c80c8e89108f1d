"""Graphs: identity, order, stable digests, plain data, and what plain data from strangers may not do."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import warnings
from random import Random
from typing import Any

import pytest
from helpers_language import MaskWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsmith.generator import mods
from flashsmith.generator.errors import SpecError
from flashsmith.generator.language import Graph, trace_mask, trace_score
from flashsmith.generator.language.graph import MAX_NODES
from flashsmith.generator.language.node import const, leaf, make
from flashsmith.generator.language.simplify import simplify


def causal_graph() -> Graph:
    return trace_mask(mods.causal).graph


def test_equal_expressions_are_the_same_node() -> None:
    a = make("add", (leaf("q_idx"), const(1)))
    assert make("add", (leaf("q_idx"), const(1))) is a
    assert const(1) is not const(1.0) and const(1) is not const(True)
    assert const(0.0) is not const(-0.0)


def test_equality_and_order() -> None:
    one = causal_graph()
    other = trace_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx).graph
    assert one == trace_mask(mods.causal).graph and hash(one) == hash(trace_mask(mods.causal).graph)
    assert one != other and (one < other) == (one.digest < other.digest) and (one < other) != (other < one)
    assert sorted([one, other]) == sorted([other, one])
    assert one != "causal"


def test_digest_is_stable_across_processes_and_hash_seeds() -> None:
    script = (
        "from flashsmith.generator import mods\n"
        "from flashsmith.generator.language import trace_mask, trace_score\n"
        "print(trace_mask(mods.sliding_window(3, 5)).graph.digest, trace_score(mods.softcap(2.0)).graph.digest)"
    )
    here = f"{trace_mask(mods.sliding_window(3, 5)).graph.digest} {trace_score(mods.softcap(2.0)).graph.digest}"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == here.split()


def test_digest_tells_values_in_the_text_apart() -> None:
    graphs = [
        trace_mask(lambda b, h, q, kv: kv <= q + 1).graph,
        trace_mask(lambda b, h, q, kv: kv <= q + 2).graph,
        trace_score(lambda s, b, h, q, kv: s * 2.0).graph,
        trace_score(lambda s, b, h, q, kv: s * 3.0).graph,
    ]
    assert len({graph.digest for graph in graphs}) == 4


@given(st.integers(0, 10**6))
@settings(max_examples=150)
def test_round_trip_of_random_masks(seed: int) -> None:
    graph = trace_mask(MaskWriter(Random(seed), large=seed % 2 == 0).mask().function()).graph
    assert Graph.from_dict(graph.to_dict()) == graph
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert copy.deepcopy(graph) == graph
    assert simplify(graph) == graph


def test_slots_are_in_order_of_first_use() -> None:
    early, late = 3, 4.5
    traced = trace_score(lambda s, b, h, q, kv: s * late + early)
    assert [(slot.name, slot.dtype) for slot in traced.graph.scalars] == [("late", "fp32"), ("early", "int32")]
    assert traced.scalars == (4.5, 3)


def test_describe() -> None:
    assert causal_graph().describe() == "kv_idx <= q_idx + (seqlen_k - seqlen_q)"
    score = trace_score(lambda s, b, h, q, kv: -(s + 1.0) / (q + 0.5))
    assert score.graph.describe() == "-(score + 1.0) / (float(q_idx) + 0.5)"


def test_describe_of_a_long_expression_is_short() -> None:
    def doubled(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for _ in range(60):  # 2^60 characters if every sum were written out
            score = score * score
        return score

    graph = trace_score(doubled).graph
    assert graph.describe() == f"score of {len(graph.nodes)} nodes, {graph.digest[:12]}"


def node_rows(*rows: Any) -> dict[str, Any]:
    return {"kind": "mask", "nodes": list(rows)}


KV, Q = ["leaf", [], "kv_idx"], ["leaf", [], "q_idx"]
LE = ["le", [0, 1], None]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"kind": "mask"},
        {"kind": "mask", "nodes": []},
        {"kind": "mask", "nodes": [KV, Q, LE], "extra": 1},
        {"kind": "bias", "nodes": [KV, Q, LE]},
        {"kind": "score", "nodes": [KV, Q, LE]},
        {"kind": ["mask"], "nodes": [KV, Q, LE]},
        node_rows(KV, Q),
        node_rows(KV, Q, ["le", [0, 2], None]),
        node_rows(KV, Q, ["le", [0, -1], None]),
        node_rows(KV, Q, ["le", [0, True], None]),
        node_rows(KV, Q, ["le", [0], None]),
        node_rows(KV, Q, ["le", [0, 1], 3]),
        node_rows(KV, Q, ["system", [0, 1], None]),
        node_rows(KV, Q, [["le"], [0, 1], None]),
        node_rows(KV, Q, ["le", "01", None]),
        node_rows(KV, Q, {"op": "le"}),
        node_rows(KV, Q, ["and", [0, 1], None]),
        node_rows(KV, Q, ["leaf", [], "b"], LE),
        node_rows(KV, ["leaf", [], "q_first"], LE),
        node_rows(KV, ["leaf", [], ["q_idx"]], LE),
        node_rows(KV, ["leaf", [0], "q_idx"], LE),
        node_rows(["leaf", [], "score"], ["const", [], "0.0"], LE),
        node_rows(KV, ["const", [], "nan"], LE),
        node_rows(KV, ["const", [], 1 << 70], LE),
        node_rows(KV, ["const", [], {}], LE),
        node_rows(KV, ["const", [], "9" * 100], LE),
        node_rows(KV, ["scalar", [], ["w; asm volatile", "int32"]], LE),
        node_rows(KV, ["scalar", [], ["w\n", "int32"]], LE),
        node_rows(KV, ["scalar", [], ["w" * 25, "int32"]], LE),
        node_rows(KV, ["scalar", [], ["a_stride_0", "int32"]], LE),
        node_rows(KV, ["scalar", [], ["w", "int8"]], LE),
        node_rows(KV, ["scalar", [], ["w", ["int32"]]], LE),
        node_rows(KV, ["scalar", [], 3], LE),
        node_rows(KV, ["load", [0], ["t", "int32", 2]], LE),
        node_rows(KV, ["load", [0], ["t", "int32", True]], LE),
        node_rows(KV, ["load", [0], ["t", "double", 1]], LE),
        node_rows(KV, ["load", [0], ["t()", "int32", 1]], LE),
        node_rows(KV, ["load", [0], ["t", "int32"]], LE),
        node_rows(KV, Q, ["shl", [0, 1], None], ["le", [0, 2], None]),
        node_rows(KV, ["scalar", [], ["t", "int32"]], ["load", [0], ["t", "int32", 1]], ["le", [1, 2], None]),
        node_rows(*[KV] * (MAX_NODES + 1)),
    ],
    ids=lambda data: str(data)[:60],
)
def test_strange_plain_data_is_refused(data: Any) -> None:
    with pytest.raises(SpecError):
        Graph.from_dict(data)


def test_a_deep_graph_needs_no_recursion() -> None:
    node: Any = leaf("score")
    for i in range(3000):
        node = make("add" if i % 2 else "mul", (node, leaf("score")))
    graph = Graph("score", node)
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph and simplify(graph).kind == "score"


def test_threads_make_one_node() -> None:
    """Nodes are compared by identity, so that two threads that make the same one must get the same one."""
    from concurrent.futures import ThreadPoolExecutor

    def chain(_: int) -> Any:
        node = leaf("q_idx")
        for i in range(300):
            node = make("add", (node, const(1000 + i)))
        return node

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(chain, range(32)))) == 1
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_can_make_nodes_while_a_thread_of_its_parent_did() -> None:
    from flashsmith.generator.language import node as module

    with module._lock, warnings.catch_warnings():  # as if another thread were making a node
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if make("add", (leaf("kv_idx"), const(77))).op == "add" else 1)
    assert os.waitpid(child, 0)[1] == 0
