"""Depth-first over the prefix cache, the subtree with the most waiting requests first (SGLang's ``dfs-weight``).

Requests that share a prefix run one after the other, so that it is read often while it is cached, and a branch of the
tree is finished before the next one needs its pages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from ...api.namespace import Namespace
from ...config.server.schedule import SCHEDULE_POLICIES
from ...kvcache.prefix_cache import Node, PrefixCache
from ...request.req import Req
from .order import Order, OrderInputs, sorted_by_cache


class HeaviestSubtreeFirst:
    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._sorted: list[tuple[Req, Node]] = []

    def __call__(self, reqs: Sequence[Req]) -> list[Req]:
        """Sort ``reqs``. Among equally heavy subtrees, the one that the last request came from is first, then the order
        of arrival decides. Requests that match a node itself follow those of its subtrees, in order of arrival."""
        current_path = self._current_path(set(reqs))
        reqs_of: dict[Node, list[Req]] = defaultdict(list)
        roots: dict[Namespace, Node] = {}  # ``match`` makes a root for each request of a namespace without pages
        for req in reqs:
            node = self._cache.match(req.tokens.view(0, req.prefix_limit), req.namespace)[0]
            reqs_of[node if node.parent is not None else roots.setdefault(node.namespace, node)].append(req)
        # Only now: a later match may have split the edge that an earlier one ended on.
        weights: Counter[Node] = Counter()
        children: dict[Node | None, list[Node]] = defaultdict(list)
        for node, members in reqs_of.items():
            step: Node | None = node
            while step is not None:
                if step not in weights:
                    children[step.parent].append(step)
                weights[step] += len(members)
                step = step.parent
        ordered: list[Req] = []
        stack = list(children[None])
        while stack:  # a node's requests first and heavy children last: the result is reversed
            node = stack.pop()
            ordered += reversed(reqs_of.get(node, []))
            stack += sorted(children[node], key=lambda child: (-weights[child], child not in current_path))
        ordered.reverse()
        node_of = {req: node for node, members in reqs_of.items() for req in members}
        self._sorted = [(req, node_of[req]) for req in ordered]
        return ordered

    def _current_path(self, waiting: set[Req]) -> set[Node]:
        """The nodes from the root to that of the last request that has left the queue, of those sorted before."""
        step: Node | None = next((node for req, node in reversed(self._sorted) if req not in waiting), None)
        path: set[Node] = set()
        while step is not None:
            path.add(step)
            step = step.parent
        return path


@SCHEDULE_POLICIES.register("dfs-weight", traits=("prefix_cache",))
def make(inputs: OrderInputs) -> Callable[[], Order]:
    return sorted_by_cache(HeaviestSubtreeFirst, inputs)
