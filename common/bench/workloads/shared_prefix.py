"""Groups of prompts with a common beginning, as with system prompts: what prefix caches and routers are for."""

from __future__ import annotations

import random

from .dataset_args import DATASETS, DatasetArgs
from .random_prompts import source
from .vocabulary import Vocabulary
from .workload import Conversation, single


@DATASETS.register("generated-shared-prefix")
def make(args: DatasetArgs, vocabulary: Vocabulary, rng: random.Random) -> list[Conversation]:
    """In random order, so that no group comes in one piece."""
    draw = source(args, vocabulary, rng)
    made = []
    for _ in range(args.gsp_num_groups):
        system = draw(args.gsp_system_prompt_len)
        made += [single(vocabulary.prompt(system + draw(args.gsp_question_len)), args.gsp_output_len)
                 for _ in range(args.gsp_prompts_per_group)]
    rng.shuffle(made)
    return made


def shareable(args: DatasetArgs) -> float:
    """The share of all prompt tokens that a cache which forgets nothing finds: all but the first of each group."""
    of_prompt = args.gsp_system_prompt_len / (args.gsp_system_prompt_len + args.gsp_question_len)
    return of_prompt * (args.gsp_prompts_per_group - 1) / args.gsp_prompts_per_group
