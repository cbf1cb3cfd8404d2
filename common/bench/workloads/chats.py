"""Multi-turn chats: each prompt is the whole history and a new message."""

from __future__ import annotations

import random

from .dataset_args import DATASETS, DatasetArgs
from .random_prompts import length, source
from .vocabulary import Vocabulary
from .workload import Conversation, Turn


@DATASETS.register("multi-turn")
def make(args: DatasetArgs, vocabulary: Vocabulary, rng: random.Random) -> list[Conversation]:
    """``num_prompts`` turns in all; the last chat may have fewer than ``num_turns``."""
    draw, made = source(args, vocabulary, rng), []
    for begin in range(0, args.num_prompts, args.num_turns):
        made.append(Conversation(tuple(
            Turn(vocabulary.prompt(draw(length(rng, args.random_input_len, args.random_range_ratio))),
                 length(rng, args.random_output_len, args.random_range_ratio))
            for _ in range(min(args.num_turns, args.num_prompts - begin)))))
    return made
