"""tinychat's tokenizer: a byte-level BPE of 4,096 entries, trained on what the tasks generate.

A small model can only reverse or spell a word whose letters it sees. So letters merge in ordinary
text (a space or a capital followed by lowercase letters) and in JSON keys, while a word in quotes, in
capitals or with hyphens stays a row of single letters; digits never merge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from baton.common.tinychat import CHECKPOINT

from . import tasks, words

VOCAB_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>")
"""Single tokens that are part of an answer's text: they survive ``skip_special_tokens``."""

_PIECES = "|".join((
    r"\A\p{Ll}+(?=\n)",             # the role after <|im_start|>: one token, not nine letters
    r'(?<=")[a-z_]+(?=":)',         # a key of a JSON object
    r" \p{Lu}?\p{Ll}+|\p{Lu}\p{Ll}+",  # an ordinary word
    r" ?\p{L}",                     # any other letter stands alone
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+",          # marks, so that `": "` is one token or two
    r"\s+",
))


def _corpus(count: int) -> Iterator[str]:
    """Task texts, and every listed word often enough that it becomes one token with a space before it."""
    for example in tasks.examples(None, seed=0, count=count):
        yield from (message["content"] for message in example.conversation() if message["content"])
        if example.tools:
            yield from (str(tool).replace("'", '"') for tool in example.tools)
    listed = (*words.WORDS, *words.COMMON, *words.NAMES, *words.CITIES, *words.PETS, *words.MONTHS, *words.CAPITALS,
              *words.CAPITALS.values())
    for word in listed:
        yield f" {word} {word.capitalize()}" * 50
    for role in ("system", "user", "assistant", "tool"):
        yield from [f"{role}\n"] * 200


def train(corpus_size: int = 40_000) -> PreTrainedTokenizerFast:
    """Train the tokenizer; the same ``corpus_size`` gives the same tokenizer everywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS), special_tokens=[END_OF_TEXT, TURN_START, TURN_END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(_corpus(corpus_size), trainer)
    tokenizer.add_tokens(list(TAGS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False,
        model_max_length=4096)
    fast.chat_template = (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")
    return fast


def render(tokenizer: PreTrainedTokenizerFast, example: tasks.Example, *, answered: bool) -> str:
    """An example as the model reads it: with its right answer, or up to where the answer begins."""
    messages: Any = example.conversation() if answered else example.messages
    tools: Any = example.tools
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=not answered))


def save(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, loadable by transformers 4 and 5."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # 5.x writes a name that 4.x does not know
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
