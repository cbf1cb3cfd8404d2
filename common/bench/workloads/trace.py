"""A request trace in Mooncake's form: arrival times, lengths, and the blocks that prompts share.

One JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), ``hash_ids``: one for each
512 tokens of the prompt. Equal ids after equal ids are equal tokens; tokens without an id are unique.
(The form is that of the traces published with Mooncake, arXiv 2407.00079.)
"""

from __future__ import annotations

import random
from typing import Annotated

import msgspec

from ...api.errors import ConfigError
from .dataset_args import DATASETS, DatasetArgs, dataset_file
from .vocabulary import Vocabulary
from .workload import Conversation, Turn

BLOCK = 512
Length = Annotated[int, msgspec.Meta(ge=1)]


class Line(msgspec.Struct):
    timestamp: float
    input_length: Length
    output_length: Length
    hash_ids: list[int] = []


@DATASETS.register("trace", "mooncake", traits=("file", "any_ids", "times"))
def make(args: DatasetArgs, vocabulary: Vocabulary, rng: random.Random) -> list[Conversation]:
    """In the order of their timestamps; the first is due at once. All ``mooncake_num_rounds`` turns ask the same."""
    lines = sorted(read(args.file, args.num_prompts), key=lambda line: line.timestamp)
    blocks: dict[int, list[int]] = {}
    made = []
    for line in lines:
        ids: list[int] = []
        for name in line.hash_ids:
            if name not in blocks:
                blocks[name] = _draw(vocabulary, random.Random(f"{args.seed}-{name}"), BLOCK)
            ids += blocks[name]
        ids += _draw(vocabulary, rng, max(0, line.input_length - len(ids)))
        due = (line.timestamp - lines[0].timestamp) / 1000 * args.trace_scale
        turn = Turn(vocabulary.prompt(ids[:line.input_length]), line.output_length)
        made.append(Conversation((turn,) * args.mooncake_num_rounds, due))
    return made


def _draw(vocabulary: Vocabulary, rng: random.Random, count: int) -> list[int]:
    return vocabulary.draw(rng, count, words=vocabulary.has_words)


def read(path: str, count: int) -> list[Line]:
    """The first ``count`` lines. Raises ConfigError."""
    decoder, number = msgspec.json.Decoder(Line), 0
    lines: list[Line] = []
    try:
        with dataset_file(path) as file:
            for text in file:
                number += 1
                if len(lines) == count:
                    break
                if text.strip():
                    lines.append(decoder.decode(text))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"Line {number} of {path} is no request of a trace: {error}.") from None
    if not lines:
        raise ConfigError(f"{path} holds no requests.")
    return lines
