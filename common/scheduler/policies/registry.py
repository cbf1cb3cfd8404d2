"""Registry of the scheduling policies by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from ...kvcache.prefix_cache import PrefixCache
from . import fcfs, lof
from .dfs_weight import HeaviestSubtreeFirst
from .lpm import LongestPrefixFirst
from .order import KeyOrder, Order, SortedOrder
from .random_order import RandomKey

PolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random"]
NAMES: tuple[str, ...] = get_args(PolicyName)


def order_maker(name: str, cache: PrefixCache | None, seed: int) -> Callable[[], Order]:
    """Returns a factory of empty orders by policy ``name``, one of ``NAMES``. Without a prefix cache, policies that use
    it are fcfs."""
    if name == "lof":
        return partial(KeyOrder, lof.key)
    if name == "random":
        return partial(KeyOrder, RandomKey(seed))
    assert name in NAMES
    if name == "fcfs" or cache is None:
        return partial(KeyOrder, fcfs.key)
    sort = LongestPrefixFirst(cache) if name == "lpm" else HeaviestSubtreeFirst(cache)
    return partial(SortedOrder, sort, lambda: cache.version)
