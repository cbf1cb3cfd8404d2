"""Subtree by subtree of the prefix cache, the one that most requests wait for first (SGLang's ``dfs-weight``).

Requests that share a prefix run one after the other, so that it is read often while it is there, and a branch of the
tree is done with before the next one needs its room.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ...kvcache.prefix_cache import Node, PrefixCache
from ...request.req import Req


class HeaviestSubtreeFirst:
    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._arranged: list[tuple[Req, Node]] = []

    def __call__(self, reqs: Sequence[Req]) -> list[Req]:
        """Of equally heavy subtrees, first the one that the last request came from, then as they came; so do requests
        of one node, which follow its subtrees."""
        begun = self._begun(set(reqs))
        standing: dict[Node, list[Req]] = defaultdict(list)
        for req in reqs:
            standing[self._cache.match(req.tokens.view(0, req.prefix_limit))[0]].append(req)
        # Only now: a later match may have split the edge that an earlier one ended on.
        weights: Counter[Node] = Counter()
        children: dict[Node | None, list[Node]] = defaultdict(list)
        for node, members in standing.items():
            step: Node | None = node
            while step is not None:
                if step not in weights:
                    children[step.parent].append(step)
                weights[step] += len(members)
                step = step.parent
        ordered: list[Req] = []
        stack = list(children[None])
        while stack:  # own requests first and heavy children last, which the reversal turns round
            node = stack.pop()
            ordered += reversed(standing.get(node, []))
            stack += sorted(children[node], key=lambda child: (-weights[child], child not in begun))
        ordered.reverse()
        node_of = {req: node for node, members in standing.items() for req in members}
        self._arranged = [(req, node_of[req]) for req in ordered]
        return ordered

    def _begun(self, waiting: set[Req]) -> set[Node]:
        """The nodes from the root to the one of the last request that has left, of those arranged before."""
        step: Node | None = next((node for req, node in reversed(self._arranged) if req not in waiting), None)
        begun: set[Node] = set()
        while step is not None:
            begun.add(step)
            step = step.parent
        return begun
