"""Questions of a ShareGPT file, with answers as long as the file's."""

from __future__ import annotations

import json
import random
from typing import Any

from ...api.errors import ConfigError
from .dataset_args import DATASETS, DatasetArgs, dataset_file
from .vocabulary import Vocabulary
from .workload import Conversation, single

_SHORTEST = 2  # tokens; what is shorter is a fragment


@DATASETS.register("sharegpt", traits=("file", "questions"))
def make(args: DatasetArgs, vocabulary: Vocabulary, rng: random.Random) -> list[Conversation]:
    """The first question of each conversation that is answered, in random order."""
    pairs = [(messages[0], messages[1]) for messages in _conversations(args.file) if len(messages) > 1]
    rng.shuffle(pairs)
    made: list[Conversation] = []
    for question, answer in pairs:
        if len(made) == args.num_prompts:
            break
        asked = question + args.prompt_suffix
        prompt = vocabulary.prompt_of_text(vocabulary.chat(asked) if args.apply_chat_template else asked)
        output = args.sharegpt_output_len or len(vocabulary.tokenizer.encode(answer, add_special_tokens=False))
        if min(prompt.num_tokens, output) < _SHORTEST:
            continue
        if args.sharegpt_context_len is None or prompt.num_tokens + output <= args.sharegpt_context_len:
            made.append(single(prompt, output))
    if not made:
        raise ConfigError(f"{args.dataset_path} holds no question and answer of {_SHORTEST} tokens or more that fit "
                          "--sharegpt-context-len.")
    return made


def texts(path: str) -> list[str]:
    """The first message of each conversation of a file."""
    found = [messages[0] for messages in _conversations(path) if messages and messages[0]]
    if not found:
        raise ConfigError(f"{path} holds no conversation.")
    return found


def _conversations(path: str) -> list[list[str]]:
    """The messages of each conversation, in order. Raises ConfigError."""
    try:
        with dataset_file(path) as file:
            entries = json.loads(file.read().decode())
        return [[_text_of(message) for message in entry.get("conversations") or entry.get("conversation") or ()]
                for entry in entries]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no ShareGPT file, a JSON list of objects with conversations, whose messages have "
                          f"a value: {error!r}.") from None


def _text_of(message: dict[str, Any]) -> str:
    text = message["value"] if "value" in message else message["content"]
    if not isinstance(text, str):
        raise TypeError(f"a message's value is {text!r}")
    return text
