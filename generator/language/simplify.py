"""`simplify`: a graph through the rules of `rules` and `isolate` until nothing changes."""

from __future__ import annotations

from .graph import Graph
from .isolate import isolate
from .node import Node, rewrite
from .rules import rebuild

_MAX_PASSES = 16


def simplify(graph: Graph) -> Graph:
    """The simplest equal graph flashsmith knows; simplifying it again changes nothing."""
    return Graph(graph.kind, simplify_node(graph.root))


def simplify_node(root: Node) -> Node:
    """The simplest node equal to `root`."""
    for _ in range(_MAX_PASSES):
        before = root
        root = rewrite([root], lambda node, args: isolate(rebuild(node, args)))[root]
        if root is before:
            break
    return root
