"""Maps beginnings of texts to the pages of their tokens, learnt from workers' answers.

A router cannot turn a chat into tokens: that takes the model's template and tokenizer, and about a
hundred times a decision's time. A worker does it anyway; asked, it names the prompt's pages in its
answer's head (``x-baton-prompt-pages``). Texts and pages both are known by hashes chained from the beginning, so what
one prompt taught serves all that share its beginning: the text's block at two fifths of its length ends about where its
page at two fifths does.

"About" is corrected by evidence: when two prompts share a block but not the page that was taken for
its end, the block gets a lower page, until all prompts that share the block share the page.
"""

from __future__ import annotations

from bisect import bisect_right

from ...common.api.kv_events import PromptPages
from .base import Publish, Replication
from .cache_aware import block_hashes, covered_bytes

Page = tuple[int, int]
"""Number of pages from the prompt's beginning to the end of this one, and its hash."""

_PAGE_BITS = 24
_MAX_PAGES = 2**_PAGE_BITS - 1


def text_blocks(text: bytes, seed: int | None = None) -> list[int]:
    """Returns the hashes of the text's blocks and, last, of the whole text, in the namespace of ``seed``."""
    blocks = [*block_hashes(text), hash((1, text))]
    return blocks if seed is None else [block ^ seed for block in blocks]


class TextPages:
    """Block hash -> page, in two generations of ``capacity // 2`` entries (about 130 bytes each).

    A page is stored as one number, ``hash << _PAGE_BITS | pages``: the garbage collector would walk as many tuples.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._generation_size = max(1, capacity // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self.bytes_per_page = 64.0
        """Recent mean of text bytes a page: 16 tokens of 4 bytes until something is known."""
        self._publish: Publish | None = None

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def knows(self, blocks: list[int]) -> bool:
        """Returns whether this very text was learnt."""
        return blocks[-1] in self._young or blocks[-1] in self._old

    def pages_of(self, blocks: list[int]) -> list[Page]:
        """The pages that the text's known blocks end with, each further than the one before."""
        young, old = self._young, self._old
        pages: list[Page] = []
        reached = 0
        for block in blocks[:-1]:
            page = young.get(block) or old.get(block)
            if page is None:
                break
            if page & _MAX_PAGES > reached:
                reached = page & _MAX_PAGES
                pages.append((reached, page >> _PAGE_BITS))
        whole = young.get(blocks[-1]) or old.get(blocks[-1])
        if whole is not None and whole & _MAX_PAGES > reached:
            pages.append((whole & _MAX_PAGES, whole >> _PAGE_BITS))
        return pages

    def replicate(self, replication: Replication) -> None:
        """Learns what other processes learn, and publishes what this one does."""
        self._publish = replication.channel(self._learn_record)

    def learn(self, blocks: list[int], size: int, pages: PromptPages) -> None:
        """Takes in the pages of a text of ``size`` bytes."""
        self._learn(blocks, size, pages)
        if self._publish is not None:
            hashes = [word for pair in pages.hashes for word in pair]
            self._publish(size, len(blocks), [pages.pages, pages.page_size, *blocks, *hashes])

    def _learn_record(self, words: list[int], size: int, num_blocks: int) -> None:
        """Learns from a record of another process: words are the prompt's pages, the page size, the blocks, and pairs
        of a page's number and hash."""
        blocks, hashes = words[2:2 + num_blocks], words[2 + num_blocks:]
        if len(blocks) == num_blocks and num_blocks and len(hashes) % 2 == 0 and words[0] > 0:
            self._learn(blocks, size, PromptPages(words[0], words[1], list(zip(hashes[::2], hashes[1::2]))))

    def _learn(self, blocks: list[int], size: int, pages: PromptPages) -> None:
        if not pages.hashes or not size or not 0 < pages.pages <= _MAX_PAGES or pages.hashes[0][0] < 1:
            return
        self.bytes_per_page += (size / pages.pages - self.bytes_per_page) * 0.05
        hash_of = dict(pages.hashes)
        numbers = list(hash_of)
        for index, block in enumerate(blocks):
            last = index == len(blocks) - 1
            most = pages.pages if last else int(min(1.0, covered_bytes(index + 1) / size) * pages.pages)
            present = self._young.get(block) or self._old.get(block)
            if present is not None and not last:
                number = present & _MAX_PAGES
                if hash_of.get(number) == present >> _PAGE_BITS:
                    self._put(block, present)
                    continue
                most = min(most, number - 1 if number in hash_of else number)
            at = bisect_right(numbers, most)
            if at:
                number = numbers[at - 1]
                self._put(block, hash_of[number] << _PAGE_BITS | number)

    def _put(self, block: int, page: int) -> None:
        if len(self._young) >= self._generation_size and block not in self._young:
            self._old, self._young = self._young, {}
        self._young[block] = page
