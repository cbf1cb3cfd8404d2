"""``bench_one_batch --correctness-test``: what the model answers to three prompts, together and alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.server import ModelArgs
from ..tokenizer.tokenizer import Tokenizer, load_tokenizer
from .client.stepped_engine import SteppedEngine

PROMPTS = ("The capital of France is", "One, two, three, four,", "Today the sun is shining and we")


@dataclass(frozen=True)
class Answered:
    """A prompt with the token ids of its greedy answers: in a batch with the others, and alone."""

    prompt: str
    together: Sequence[int]
    alone: Sequence[int]

    def shown(self, tokenizer: Tokenizer) -> str:
        text = f"{self.prompt!r}: {tokenizer.decode(self.together, skip_special_tokens=False)!r}"
        if list(self.together) == list(self.alone):
            return text
        alone = tokenizer.decode(self.alone, skip_special_tokens=False)
        return (f"{text}\n  alone: {alone!r} (another batch may round otherwise: compare with "
                "--enable-deterministic-inference)")


def tokenizer_of(model: ModelArgs) -> Tokenizer:
    """Raises ConfigError."""
    return load_tokenizer(model.tokenizer_path or model.model_path, model.revision,
                          trust_remote_code=model.trust_remote_code, download_dir=model.download_dir)


def answered(engine: SteppedEngine, tokenizer: Tokenizer, output_len: int) -> list[Answered]:
    """Raises ConfigError where the prompts do not fit."""
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    together = engine.complete(ids, output_len)
    alone = [engine.complete([prompt], output_len)[0] for prompt in ids]
    return [Answered(*each) for each in zip(PROMPTS, together, alone)]
