"""The data sets by name."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import chats, random_prompts, shared_prefix, sharegpt, trace
from .dataset_args import DatasetArgs
from .vocabulary import Vocabulary
from .workload import Conversation

_MAKERS: dict[str, Callable[[DatasetArgs, Vocabulary, random.Random], list[Conversation]]] = {
    "random": random_prompts.make, "random-ids": random_prompts.make, "generated-shared-prefix": shared_prefix.make,
    "multi-turn": chats.make, "sharegpt": sharegpt.make, "trace": trace.make, "mooncake": trace.make,
}


def make_workload(args: DatasetArgs, vocabulary: Vocabulary) -> list[Conversation]:
    """The same for the same arguments and vocabulary. Raises ConfigError where a file cannot be used."""
    return _MAKERS[args.dataset_name](args, vocabulary, random.Random(args.seed))
