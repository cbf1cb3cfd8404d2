"""Prompts of random words or tokens, or of a ShareGPT file's text, in random lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from . import sharegpt
from .dataset_args import DATASETS, DatasetArgs
from .vocabulary import Vocabulary
from .workload import Conversation, single

Source = Callable[[int], list[int]]
"""``source(count)`` returns ``count`` token ids."""


@DATASETS.register("random")
@DATASETS.register("random-ids", traits=("any_ids",))
def make(args: DatasetArgs, vocabulary: Vocabulary, rng: random.Random) -> list[Conversation]:
    ids = source(args, vocabulary, rng)
    return [single(vocabulary.prompt(ids(length(rng, args.random_input_len, args.random_range_ratio))),
                   length(rng, args.random_output_len, args.random_range_ratio)) for _ in range(args.num_prompts)]


def length(rng: random.Random, most: int, ratio: float) -> int:
    """Between ``ratio * most`` and ``most``, each as likely as the others; at least 1."""
    return rng.randint(max(1, int(most * ratio)), most)


def source(args: DatasetArgs, vocabulary: Vocabulary, rng: random.Random) -> Source:
    if args.dataset_name != "random-ids" and args.dataset_path is not None:
        return _of_text(sharegpt.texts(args.dataset_path), vocabulary, rng)
    words = args.dataset_name != "random-ids" and vocabulary.has_words
    return lambda count: vocabulary.draw(rng, count, words=words)


def _of_text(texts: list[str], vocabulary: Vocabulary, rng: random.Random) -> Source:
    """Reads through the texts in random order, repeatedly."""
    def tokens() -> Iterator[int]:
        while True:
            for text in rng.sample(texts, len(texts)):
                yield from vocabulary.tokenizer.encode(text, add_special_tokens=False)

    stream = tokens()
    return lambda count: [next(stream) for _ in range(count)]
