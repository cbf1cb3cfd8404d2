"""Records which pages host memory and storage have, as KV events with their medium.

Tiers know pages by key alone. An event needs their hash, the one before, and their tokens (Dynamo indexes no other): a
page is learnt when it enters the prefix cache, through which all pages of tiers go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..api.kv_events import DISK, HOST, Event, Medium, Removed, Stored
from ..kvcache.page_keys import PageKey


class _Page(NamedTuple):
    hash: int
    before: int | None
    tokens: tuple[int, ...]


class _Contents:
    """Pages of one medium, by key. Equal pages that differ in their lookahead have one hash, as on the device."""

    def __init__(self) -> None:
        self.pages: dict[PageKey, _Page] = {}
        self._num_keys: Counter[int] = Counter()  # by hash

    def add(self, key: PageKey, page: _Page) -> bool:
        """False where the medium had the hash already."""
        if key in self.pages:
            return False
        self.pages[key] = page
        self._num_keys[page.hash] += 1
        return self._num_keys[page.hash] == 1

    def remove(self, keys: Iterable[PageKey]) -> list[int]:
        """Returns the hashes that the medium has no more."""
        gone = []
        for key in keys:
            if (page := self.pages.pop(key, None)) is not None:
                self._num_keys[page.hash] -= 1
                if not self._num_keys[page.hash]:
                    del self._num_keys[page.hash]
                    gone.append(page.hash)
        return gone


class TierEventRecorder:
    """Listener of a host tier (``HostListener``) and of a storage's writes."""

    def __init__(self, page_size: int, max_pages: int):
        """``max_pages``: pages that are remembered after they left the prefix cache, and as many in storage; about 0.3
        KB each."""
        self._page_size = page_size
        self._max_pages = max_pages
        self._known: dict[PageKey, _Page] = {}  # those that entered the prefix cache last at the end
        self._media: dict[Medium, _Contents] = {HOST: _Contents(), DISK: _Contents()}
        self._awaited: set[PageKey] = set()  # in host memory, and not learnt yet
        self._events: list[Event] = []

    def __len__(self) -> int:
        """Pages that subscribers count."""
        return sum(len(contents.pages) for contents in self._media.values())

    def learn(self, keys: Sequence[PageKey], hashes: Sequence[int], before: int | None, tokens: Sequence[int]) -> None:
        """Pages of ``tokens`` entered the prefix cache; ``before`` is the hash of the page before them."""
        for index, (key, page_hash) in enumerate(zip(keys, hashes)):
            page = _Page(page_hash, before, tuple(tokens[index * self._page_size:(index + 1) * self._page_size]))
            before = page_hash
            self._known.pop(key, None)
            self._known[key] = page
            if key in self._awaited:
                self._awaited.remove(key)
                self._add(HOST, key, page)
        while len(self._known) > self._max_pages:
            del self._known[next(iter(self._known))]

    def stored(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            if (page := self._known.get(key)) is None:
                self._awaited.add(key)
            else:
                self._add(HOST, key, page)

    def dropped(self, keys: Sequence[PageKey]) -> None:
        self._awaited.difference_update(keys)
        self._remove(HOST, keys)

    def cleared(self) -> None:
        self._awaited.clear()
        self._remove(HOST, list(self._media[HOST].pages))

    def written(self, keys: Sequence[PageKey]) -> None:
        """The pages of ``keys`` are in storage. What a storage drops for lack of room is not reported."""
        disk = self._media[DISK]
        for key in keys:
            page = self._media[HOST].pages.get(key) or self._known.get(key)
            if page is not None:
                self._add(DISK, key, page)
        while len(disk.pages) > self._max_pages:
            disk.remove([next(iter(disk.pages))])

    def storage_cleared(self) -> None:
        """The storage is empty, or has been detached."""
        self._remove(DISK, list(self._media[DISK].pages))

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def snapshot(self) -> Iterator[Event]:
        """Events that make an empty copy equal, including changes not taken yet."""
        for medium, contents in self._media.items():
            for page in {page.hash: page for page in contents.pages.values()}.values():
                yield Stored([page.hash], page.before, page.tokens, self._page_size, medium)

    def _add(self, medium: Medium, key: PageKey, page: _Page) -> None:
        if not self._media[medium].add(key, page):
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, Stored) and last.medium == medium and last.hashes[-1] == page.before:
            self._events[-1] = last._replace(hashes=[*last.hashes, page.hash], token_ids=[*last.token_ids,
                                                                                          *page.tokens])
        else:
            self._events.append(Stored([page.hash], page.before, page.tokens, self._page_size, medium))

    def _remove(self, medium: Medium, keys: Sequence[PageKey]) -> None:
        if gone := self._media[medium].remove(keys):
            self._events.append(Removed(gone, medium))
