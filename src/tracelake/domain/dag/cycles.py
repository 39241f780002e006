"""Order and cycles of a graph of names. Nothing here recurses: a DAG may be a chain of any length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def find_cycles(parents: Mapping[T, Iterable[T]]) -> list[list[T]]:
    """One cycle per tangle, each ``[a, b, c]`` with a's parent b, b's parent c and c's parent a.

    A cycle begins at the node of it that comes first in ``parents``.
    """
    left = {node: [parent for parent in found if parent in parents] for node, found in parents.items()}
    for node in topological(left):
        del left[node]
    left = {node: [parent for parent in found if parent in left] for node, found in left.items()}
    cycles: list[list[T]] = []
    done: set[T] = set()
    rank = {node: index for index, node in enumerate(parents)}
    for start in left:
        walk: dict[T, None] = {}
        node = start
        while node not in walk and node not in done:
            walk[node] = None
            node = left[node][0]
        if node in walk:
            ring = list(walk)[list(walk).index(node) :]
            first = min(range(len(ring)), key=lambda index: rank[ring[index]])
            cycles.append(ring[first:] + ring[:first])
        done.update(walk)
    return cycles


def topological(parents: Mapping[T, Iterable[T]]) -> list[T]:
    """Every node after its parents, in the given order otherwise; nodes on or behind a cycle are left out."""
    waiting = {node: set(found) for node, found in parents.items()}
    children: dict[T, list[T]] = {}
    for node, found in waiting.items():
        for parent in found:
            children.setdefault(parent, []).append(node)
    ready = [node for node, found in waiting.items() if not found]
    ordered: list[T] = []
    for node in ready:
        ordered.append(node)
        for child in children.get(node, ()):
            waiting[child].discard(node)
            if not waiting[child]:
                ready.append(child)
    return ordered
