"""Which pages the beginnings of texts come to, learnt from workers' answers.

A router cannot turn a chat into tokens: that takes the model's template and tokenizer, and about a
hundred times a decision's time. A worker does it anyway; asked, it names the prompt's pages in its
answer's head (``x-baton-prompt-pages``). Text and pages both come in chains, so what one prompt taught
serves all that share its beginning: the text's block at two fifths of its length ends about where its
page at two fifths does.

"About" is corrected by evidence: when two prompts share a block but not the page that was taken for
its end, the block gets a lower page, until all prompts that share the block share the page.
"""

from __future__ import annotations

from bisect import bisect_right

from ...common.api.kv_events import PromptPages
from .cache_aware import block_hashes, covered_bytes

Page = tuple[int, int]
"""Number of pages from the prompt's beginning to the end of this one, and its hash."""

_BITS = 24
_MOST = 2**_BITS - 1


def text_blocks(text: bytes) -> list[int]:
    """Hashes of the text's blocks and, last, of the whole text."""
    return [*block_hashes(text), hash((1, text))]


class TextPages:
    """Block hash -> page, in two generations of ``capacity // 2`` entries (about 130 bytes each).

    A page is kept as one number, ``hash << _BITS | pages``: the garbage collector would walk as many tuples.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._half = max(1, capacity // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self.bytes_per_page = 64.0
        """Text bytes that come to a page, of late: 16 tokens of 4 bytes until something is known."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def knows(self, blocks: list[int]) -> bool:
        """Whether this very text was learnt."""
        return blocks[-1] in self._young or blocks[-1] in self._old

    def chain(self, blocks: list[int]) -> list[Page]:
        """The pages that the text's known blocks end with, each further than the one before."""
        young, old = self._young, self._old
        found: list[Page] = []
        reached = 0
        for block in blocks[:-1]:
            page = young.get(block) or old.get(block)
            if page is None:
                break
            if page & _MOST > reached:
                reached = page & _MOST
                found.append((reached, page >> _BITS))
        whole = young.get(blocks[-1]) or old.get(blocks[-1])
        if whole is not None and whole & _MOST > reached:
            found.append((whole & _MOST, whole >> _BITS))
        return found

    def learn(self, blocks: list[int], size: int, pages: PromptPages) -> None:
        """Take in the pages of a text of ``size`` bytes."""
        if not pages.hashes or not size or not 0 < pages.pages <= _MOST or pages.hashes[0][0] < 1:
            return
        self.bytes_per_page += (size / pages.pages - self.bytes_per_page) * 0.05
        told = dict(pages.hashes)
        numbers = list(told)
        for index, block in enumerate(blocks):
            last = index == len(blocks) - 1
            most = pages.pages if last else int(min(1.0, covered_bytes(index + 1) / size) * pages.pages)
            present = self._young.get(block) or self._old.get(block)
            if present is not None and not last:
                number = present & _MOST
                if told.get(number) == present >> _BITS:
                    self._keep(block, present)
                    continue
                most = min(most, number - 1 if number in told else number)
            at = bisect_right(numbers, most)
            if at:
                number = numbers[at - 1]
                self._keep(block, told[number] << _BITS | number)

    def _keep(self, block: int, page: int) -> None:
        if len(self._young) >= self._half and block not in self._young:
            self._old, self._young = self._young, {}
        self._young[block] = page
