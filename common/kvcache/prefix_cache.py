"""Prefix cache: radix trees over token ids, one a namespace, whose edges own KV pages.

The idea is RadixAttention's (Zheng et al., SGLang, 2024): finished requests leave their pages in a tree
keyed by the tokens they were computed from, and a new prompt reuses the pages of its longest prefix.
An edge is a whole number of pages; a partial page never enters the tree. Pages of different namespaces
(``api.namespace``) are never shared: each namespace has a root of its own, from its first page to its last.

Where a drafter stores at a token's slot what depends on the token after it, too (EAGLE), two pages are equal only if
the first tokens after them are: a page is known by its own tokens and a *lookahead* of one more. (SGLang's radix cache
has keys of two tokens for EAGLE, to the same end.)

The pages of an edge are the first cache group's. Of further groups (cache_group.py) it has the pages that their rules
make useful and that were not evicted since, which they are before the edge is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..api.namespace import SHARED, Namespace
from .cache_group import ABSENT, CacheGroup
from .eviction.base import EvictionOrder, EvictionQueue, Usage
from .eviction.lru import LeastRecentlyUsed
from .page_keys import PageKey, namespace_key, page_keys


class Node:
    """An edge of the tree and the point it leads to.

    ``tokens`` (int32) has ``page_size`` entries for each of ``pages`` (int64), and the lookahead. ``locks`` counts the
    requests that read this node or one below it: a locked node is not evicted. ``usage`` is what eviction policies go
    by. A root has neither tokens, locks nor a parent.
    ``group_pages`` has the page ids (int64) of each further group, ABSENT for those that it lacks. ``keys`` are those
    under which tiers keep copies of the pages; None until they are asked for.
    """

    __slots__ = ("namespace", "tokens", "pages", "group_pages", "keys", "parent", "children", "locks", "usage")

    def __init__(self, namespace: Namespace, tokens: np.ndarray, pages: np.ndarray, parent: Node | None,
                 group_pages: Sequence[np.ndarray] = ()):
        self.namespace = namespace
        self.tokens = tokens
        self.pages = pages
        self.group_pages = group_pages
        self.keys: list[PageKey] | None = None
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.usage = Usage()

    def __repr__(self) -> str:
        return f"Node({len(self.pages)} pages, {self.locks} locks, {len(self.children)} children)"


class CacheListener(Protocol):
    """Listener that is called for every page that enters or leaves the tree."""

    def stored(self, node: Node, parent: int | None, pages: np.ndarray, tokens: np.ndarray) -> None:
        """``pages`` of ``tokens``, without a lookahead, follow page ``parent`` (None: they begin a prompt) and are a
        new ``node``; both arrays are the tree's own. Equal pages that differ in their lookahead are stored, and
        removed, one by one."""

    def removed(self, namespace: Namespace, pages: np.ndarray) -> None: ...

    def weights_changed(self, weights: str) -> None:
        """Only pages in namespaces of ``weights`` can be matched from now on."""


class Edge(NamedTuple):
    """An edge's content; ``parent`` is the page before its first one, None at the beginning of a prompt."""

    namespace: Namespace
    parent: int | None
    pages: np.ndarray
    tokens: np.ndarray


class PrefixCache:
    """The trees of all namespaces. It owns the pages of its nodes; callers lock what they read.

    ``num_pages`` counts all pages owned, ``num_locked`` those of locked nodes.
    ``listeners`` are called on changes, in order; they are added while the cache is empty.
    """

    def __init__(self, page_size: int, groups: Sequence[CacheGroup] = (), lookahead: int = 0,
                 order: EvictionOrder | None = None):
        """``groups`` are the further groups, whose pages enter by ``CacheGroup.give_to_cache``. ``lookahead``: tokens
        after a page on which its content depends. ``order``: the eviction policy, by default LRU."""
        self.page_size = page_size
        self.lookahead = lookahead
        self._groups = groups
        self._roots: dict[Namespace, Node] = {}  # those that have children
        self.num_pages = 0
        self.num_locked = 0
        self.version = 0  # grows with every change of what can be matched
        self._clock = 0
        self._order: EvictionOrder = LeastRecentlyUsed() if order is None else order
        self._evictable: EvictionQueue[Node] = EvictionQueue(self._order)
        """The unlocked leaves."""
        self._in_group: list[EvictionQueue[Node]] = [EvictionQueue(self._order) for _ in groups]
        """Of each further group the nodes that have pages of it."""
        self.listeners: list[CacheListener] = []

    def __repr__(self) -> str:
        return f"PrefixCache({self.num_pages} pages in {len(self._roots)} namespaces, {self.num_locked} locked)"

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    def match(self, tokens: np.ndarray, namespace: Namespace = SHARED) -> tuple[Node, np.ndarray]:
        """The node and page ids of the longest prefix of ``tokens`` (int32, the lookahead included) that is cached in a
        namespace, in whole pages; a root where nothing is.

        Splits an edge where the prefix ends inside it, so that the node covers exactly the prefix. After this prefix
        tokens can be computed: it ends where each further group has the pages that they read.
        """
        root = self._roots.get(namespace) or _root(namespace)
        node, pages = self._walk(root, tokens)
        if self._groups and (count := self._reusable_pages(node, len(pages))) < len(pages):
            node, pages = self._walk(root, tokens[:count * self.page_size + self.lookahead])
        self._touch(node)
        return node, pages

    def match_first_group(self, tokens: np.ndarray, namespace: Namespace = SHARED) -> tuple[Node, np.ndarray]:
        """``match`` without regard to further groups."""
        node, pages = self._walk(self._roots.get(namespace) or _root(namespace), tokens)
        self._touch(node)
        return node, pages

    def group_pages(self, node: Node, group: int, first: int, count: int) -> np.ndarray:
        """Page ids ``[count - first]`` of a further group from page ``first`` on of a path of ``count`` pages that ends
        with ``node``; ABSENT where the tree lacks one."""
        parts = [edge.group_pages[group][max(0, first - before):]
                 for before, edge in self.edges_from(node, first, count)]
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)

    def edges_from(self, node: Node, first: int, count: int) -> Iterator[tuple[int, Node]]:
        """Yields the edges with pages from ``first`` on of a path of ``count`` pages that ends with ``node``, the last
        one first, and the number of pages before each."""
        step: Node | None = node
        while count > first and step is not None:
            count -= len(step.pages)
            yield count, step
            step = step.parent

    def _reusable_pages(self, node: Node, count: int) -> int:
        """Pages of the longest beginning of a path of ``count`` pages, which ends with ``node``, after which tokens can
        be computed."""
        present = [self.group_pages(node, index, 0, count) != ABSENT for index in range(len(self._groups))]
        before = -1
        while count != before:
            before = count
            for group, there in zip(self._groups, present):
                count = group.rule.reusable_pages(there[:count], self.page_size)
        return count

    def _walk(self, node: Node, tokens: np.ndarray) -> tuple[Node, np.ndarray]:
        """The deepest node below ``node`` that ``tokens`` reach, and the pages on the path."""
        pages = []
        done = 0
        while (child := node.children.get(self._key(tokens[done:]))) is not None:
            common = self._common_pages(child, tokens[done:])
            if common < len(child.pages):
                child = self._split(child, common)
            pages.append(child.pages)
            done += common * self.page_size
            node = child
        return node, np.concatenate(pages) if pages else np.empty(0, np.int64)

    def insert(self, tokens: np.ndarray, pages: np.ndarray, below: Node | None = None,
               priority: int = 0) -> tuple[Node, int]:
        """Make ``tokens`` (int32, whole pages and the lookahead) a path of the tree that begins below ``below``, which
        ``match`` returned (None: at the root of ``SHARED``).

        Takes ownership of ``pages[n:]`` and returns the path's last node with n, the number of leading pages that the
        tree had already: the caller keeps those of ``pages``. ``priority`` is that of the request.
        """
        assert len(tokens) == len(pages) * self.page_size + self.lookahead
        if below is None or below.parent is None:  # that root may have left, and another come
            namespace = SHARED if below is None else below.namespace
            below = self._roots.get(namespace) or _root(namespace)
        node, matched = self._walk(below, tokens)
        present = len(matched)
        if present < len(pages):
            rest = tokens[present * self.page_size :]
            absent = [np.full(len(pages) - present, ABSENT, np.int64) for _ in self._groups]
            leaf = Node(node.namespace, rest.copy(), pages[present:].copy(), node, absent)
            leaf.usage.priority = priority
            leaf.usage.begin = node.usage.begin + len(node.pages) * self.page_size
            leaf.usage.history = leaf.usage.begin + len(leaf.pages) * self.page_size
            self._evictable.discard(node)
            node.children[self._key(rest)] = leaf
            if node.parent is None:
                self._roots[node.namespace] = node
            self.num_pages += len(leaf.pages)
            self.version += 1
            for listener in self.listeners:
                listener.stored(leaf, _last_page(node), leaf.pages, self._own_tokens(leaf))
            node = leaf
        self._touch(node)
        return node, present

    def record_use(self, node: Node, priority: int) -> None:
        """Count a request that reads the path to ``node``."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.usage.num_uses += 1
            step.usage.priority = max(step.usage.priority, priority)
            step = step.parent
        self._queue(node)

    def lock(self, node: Node) -> None:
        self._add_locks(node, +1)

    def unlock(self, node: Node) -> None:
        self._add_locks(node, -1)

    def move_lock(self, above: Node, node: Node) -> None:
        """Lock ``node``, and unlock its ancestor ``above``."""
        self._add_locks(node, +1, above)

    def evict(self, count: int, on_evicted: Callable[[Node], None] | None = None) -> np.ndarray:
        """Remove unlocked leaves, in the order of the policy, until ``count`` pages are removed or none is left.

        Returns the removed page ids, which now belong to the caller. May remove more than ``count``: a leaf is removed
        as a whole. ``on_evicted`` is called with each leaf, in the order of their pages in the result.
        """
        freed: list[np.ndarray] = []
        total = 0
        while self._evictable and total < count:
            leaf = self._evictable.pop()
            parent = leaf.parent
            assert parent is not None
            del parent.children[self._key(leaf.tokens)]
            freed.append(leaf.pages)
            if on_evicted is not None:
                on_evicted(leaf)
            for group, queue, ids in zip(self._groups, self._in_group, leaf.group_pages):
                group.free_cached(ids[ids != ABSENT])
                queue.discard(leaf)
            for listener in self.listeners:
                listener.removed(leaf.namespace, leaf.pages)
            total += len(leaf.pages)
            if parent.parent is None and not parent.children:
                del self._roots[parent.namespace]
            self._queue(parent)
        self.num_pages -= total
        self.version += bool(total)
        return np.concatenate(freed) if freed else np.empty(0, np.int64)

    def next_evicted(self, count: int) -> list[Node]:
        """The leaves with ``count`` pages that ``evict`` would remove first, or all that it can remove now. They stay.
        """
        leaves: list[Node] = []
        total = 0
        while self._evictable and total < count:
            leaves.append(leaf := self._evictable.pop())
            total += len(leaf.pages)
        for leaf in leaves:
            self._queue(leaf)
        return leaves

    def add_to_group(self, node: Node, index: int) -> None:
        """Record that ``node`` has got pages of a further group."""
        self._in_group[index].put(node, node.usage)
        self.version += 1

    @property
    def has_groups(self) -> bool:
        """True where edges have pages of further groups."""
        return bool(self._groups)

    def evict_from_group(self, index: int, count: int,
                         on_freed: Callable[[Node, np.ndarray], None] | None = None) -> None:
        """Free ``count`` pages of a further group that no request reads, or all of these: of the edges that the policy
        evicts first, and of each the first, without which the prefixes that end behind them can still be reused.
        ``on_freed`` is called with each edge, which still has its pages, and the places of the freed ones."""
        group, queue = self._groups[index], self._in_group[index]
        kept = []
        while queue and count > 0:
            node = queue.pop()
            ids = node.group_pages[index]
            places = np.flatnonzero(ids != ABSENT)
            freed = places[group.unread_of(ids[places])][:count]
            if on_freed is not None and len(freed):
                on_freed(node, freed)
            group.free_cached(ids[freed])
            ids[freed] = ABSENT
            count -= len(freed)
            self.version += bool(len(freed))
            if len(freed) < len(places):
                kept.append(node)
        for node in kept:
            queue.put(node, node.usage)

    def page_keys(self, node: Node) -> list[PageKey]:
        """The keys of a node's pages, by content; a root has one, that before a prompt's first page."""
        path = []
        step: Node | None = node
        while step is not None and step.keys is None:
            path.append(step)
            step = step.parent
        for step in reversed(path):
            before = step.parent
            step.keys = ([namespace_key(step.namespace)] if before is None or before.keys is None else
                         page_keys(before.keys[-1], step.tokens, self.page_size, self.lookahead))
        assert node.keys is not None
        return node.keys

    def keys_below(self, node: Node, tokens: np.ndarray) -> list[PageKey]:
        """The keys of the full pages of ``tokens`` (int32, the lookahead included), which follow those of the path to
        ``node``."""
        return page_keys(self.page_keys(node)[-1], tokens, self.page_size, self.lookahead)

    def edges(self) -> Iterator[Edge]:
        """Yields every edge, parents before children."""
        for node in self._nodes():
            assert node.parent is not None
            yield Edge(node.namespace, _last_page(node.parent), node.pages, self._own_tokens(node))

    def check_integrity(self) -> None:
        """Recount everything; asserts that the totals hold and that no page has two owners."""
        nodes = list(self._nodes())
        pages = np.concatenate([n.pages for n in nodes]) if nodes else np.empty(0, np.int64)
        assert len(np.unique(pages)) == len(pages) == self.num_pages, "the tree's page count is off"
        assert sum(len(n.pages) for n in nodes if n.locks) == self.num_locked, "the tree's lock count is off"
        assert all(root.children for root in self._roots.values()), "a namespace without pages was kept"
        leaves = [node for node in nodes if not node.children and not node.locks]
        assert len(leaves) == len(self._evictable) and all(leaf in self._evictable for leaf in leaves), (
            "a leaf that can be evicted is not queued, or another one is")
        assert all(node in queue for index, queue in enumerate(self._in_group) for node in nodes
                   if (node.group_pages[index] != ABSENT).any()), "a node with pages of a further group is not queued"

    def cached_in_group(self, index: int) -> np.ndarray:
        """Ids of all pages of a further group that the tree has."""
        ids = np.empty(0, np.int64)
        ids = np.concatenate([ids, *(node.group_pages[index] for node in self._nodes())])
        return np.delete(ids, np.flatnonzero(ids == ABSENT))

    def _nodes(self) -> Iterator[Node]:
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _key(self, tokens: np.ndarray) -> bytes:
        """Key of a child: the tokens of its first page, and the lookahead. Fewer tokens match no child."""
        return tokens[: self.page_size + self.lookahead].tobytes()

    def _own_tokens(self, node: Node) -> np.ndarray:
        """The tokens of a node's pages, without the lookahead."""
        return node.tokens[: len(node.pages) * self.page_size]

    def _common_pages(self, node: Node, tokens: np.ndarray) -> int:
        """Pages that a node and ``tokens``, whose first page is the node's, have in common."""
        length = min(len(node.tokens), len(tokens))
        differ = np.flatnonzero(node.tokens[:length] != tokens[:length])
        return ((int(differ[0]) if len(differ) else length) - self.lookahead) // self.page_size

    def _split(self, node: Node, pages: int) -> Node:
        """Cut an edge after ``pages`` pages; returns the new upper node."""
        cut = pages * self.page_size
        assert node.parent is not None and 0 < pages < len(node.pages)
        upper = Node(node.namespace, node.tokens[:cut + self.lookahead], node.pages[:pages], node.parent,
                     [ids[:pages] for ids in node.group_pages])
        upper.locks, upper.usage = node.locks, node.usage.copy()
        node.usage.begin += cut
        if node.keys is not None:
            upper.keys, node.keys = node.keys[:pages], node.keys[pages:]
        node.parent.children[self._key(node.tokens)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[pages:], upper
        node.group_pages = [ids[pages:] for ids in node.group_pages]
        upper.children[self._key(node.tokens)] = node
        self._queue(node)
        for queue in self._in_group:
            if node in queue:  # either part may have the pages
                queue.put(upper, upper.usage)
                queue.put(node, node.usage)
        return upper

    def _add_locks(self, node: Node, delta: int, until: Node | None = None) -> None:
        step: Node | None = node
        while step is not None and step is not until and step.parent is not None:
            before, step.locks = step.locks, step.locks + delta
            assert step.locks >= 0, "a node was unlocked twice"
            if bool(before) != bool(step.locks):
                self.num_locked += delta * len(step.pages)
            step = step.parent
        if node.locks:
            self._evictable.discard(node)
        else:
            self._queue(node)

    def _queue(self, node: Node) -> None:
        """Let a node be evicted from now on, by its usage of now, where it is an unlocked leaf."""
        if not node.children and not node.locks and node.parent is not None:
            self._evictable.put(node, node.usage)

    def _touch(self, node: Node) -> None:
        """Record a use of the path to ``node``, which may have grown."""
        self._clock += 1
        history = node.usage.history
        step: Node | None = node
        while step is not None:
            usage = step.usage
            usage.last_used = self._clock
            usage.history = history = max(history, usage.history)
            step = step.parent
        self._queue(node)


def _root(namespace: Namespace) -> Node:
    return Node(namespace, np.empty(0, np.int32), np.empty(0, np.int64), None)


def _last_page(node: Node) -> int | None:
    return int(node.pages[-1]) if len(node.pages) else None
