"""Trees of what followed an n-gram in several places."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from ..api.drafts import Drafts


class _Node:
    """A token after those of its ancestors, with the number of continuations that have it there."""

    __slots__ = ("children", "count", "token")

    def __init__(self, token: int):
        self.token = token
        self.count = 0
        self.children: dict[int, _Node] = {}

    def best(self, breadth: int) -> list[_Node]:
        """Returns the most frequent children, of equal ones those that came first."""
        return sorted(self.children.values(), key=lambda child: -child.count)[:breadth]


def tree_of(continuations: Sequence[Sequence[int]], breadth: int, limit: int, *, by_frequency: bool) -> Drafts | None:
    """Returns up to ``limit`` tokens of ``continuations``, newest first, as a tree of at most ``breadth`` children a
    node: level by level, or ``by_frequency`` those of the most probable paths. None where there are none."""
    root = _Node(-1)
    for continuation in continuations:
        at = root
        for token in continuation:
            at = at.children.setdefault(token, _Node(token))
            at.count += 1
    chosen = _by_frequency(root, breadth, limit) if by_frequency else _by_level(root, breadth, limit)
    if not chosen:
        return None
    tokens, parents = zip(*chosen)
    is_chain = all(parent == index - 1 for index, parent in enumerate(parents))
    return Drafts(tokens, None if is_chain else parents)


def _by_level(root: _Node, breadth: int, limit: int) -> list[tuple[int, int]]:
    """Returns tokens and the indices of their parents, level by level."""
    chosen: list[tuple[int, int]] = []
    queue = deque([(root, -1)])
    while queue and len(chosen) < limit:
        node, index = queue.popleft()
        for child in node.best(breadth)[:limit - len(chosen)]:
            queue.append((child, len(chosen)))
            chosen.append((child.token, index))
    return chosen


def _by_frequency(root: _Node, breadth: int, limit: int) -> list[tuple[int, int]]:
    """Returns tokens and the indices of their parents, the most probable paths first."""
    chosen: list[tuple[int, int]] = []
    heap: list[tuple[float, int, _Node, int]] = []
    order = 0

    def push(node: _Node, share: float, index: int) -> None:
        nonlocal order
        total = sum(child.count for child in node.children.values())
        for child in node.best(breadth):
            order += 1
            heapq.heappush(heap, (-share * child.count / total, order, child, index))

    push(root, 1.0, -1)
    while heap and len(chosen) < limit:
        share, _, node, parent = heapq.heappop(heap)
        chosen.append((node.token, parent))
        push(node, -share, len(chosen) - 1)
    return chosen
