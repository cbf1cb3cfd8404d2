"""The data sets by name; each registers in its file."""

from __future__ import annotations

import random

from .dataset_args import DATASETS, DatasetArgs
from .vocabulary import Vocabulary
from .workload import Conversation


def make_workload(args: DatasetArgs, vocabulary: Vocabulary) -> list[Conversation]:
    """The same for the same arguments and vocabulary. Raises ConfigError where a file cannot be used."""
    return DATASETS.get(args.dataset_name)(args, vocabulary, random.Random(args.seed))
