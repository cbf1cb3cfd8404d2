"""Compares a model family with transformers on the same random weights, in a second or two: ``check_family``.

``BATON_FAMILY_SEED=$RANDOM pytest tests/common/models/test_families_*.py`` draws other weights and prompts; by default
they are the same in every run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from baton.common.distributed.parallel import Parallel
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.small_models import (
    check_chunks,
    expected_logits,
    forward,
    greedy,
    load_runner,
    scattered_pages,
    server_config,
)
from baton.tests.helpers.thread_ranks import on_ranks

SEED = int(os.environ.get("BATON_FAMILY_SEED", "0"))
VOCAB = 131
SMALL = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 7,
         "bos_token_id": 1, "pad_token_id": 0}
"""Odd sizes, of which a family's own are given to ``check_family``: heads of 12 values by default."""
TOLERANCE = 2e-4
_GREEDY = 6
_PAGES_AND_CHUNKS = ((1, 7), (16, 23), (64, 64))


def check_family(folder: Path, name: str, *, config_name: str | None = None, tolerance: float = TOLERANCE,
                 tp: int = 2, **config: Any) -> None:
    """Saves a random model ``{name}ForCausalLM`` of transformers in ``folder``, with the fields ``config`` of
    ``{config_name or name}Config`` besides ``SMALL``, and asserts that Baton computes the same: logits of ragged
    prompts in chunks, then of a joint decode step, with pages of 1, 16 and 64 tokens; of prompts that share the pages
    of a prefix; greedy tokens of the scheduler with its prefix cache; and logits on ``tp`` ranks (0: on one alone)."""
    check_model(folder, save_random(folder, name, config_name=config_name, **config), tolerance, tp)


def save_random(folder: Path, name: str, *, config_name: str | None = None, std: float = 0.1, **config: Any) -> Any:
    """Returns a random model of transformers, which it saves in ``folder``; see ``check_family`` and ``randomize``."""
    made = getattr(transformers, f"{config_name or name}Config")(**{**SMALL, **config})
    made._attn_implementation = "eager"
    torch.manual_seed(SEED)
    model = getattr(transformers, f"{name}ForCausalLM")(made).eval()
    randomize(model, std)
    model.save_pretrained(folder)
    return model


def randomize(model: torch.nn.Module, std: float = 0.1) -> None:
    """Gives a model random weights: matrices are normal with this deviation, vectors (norms and biases) uniform around
    what they were."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, std)
            else:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))


def check_model(folder: Path, model: Any, tolerance: float = TOLERANCE, tp: int = 2) -> None:
    """Asserts what ``check_family`` does, of a ``model`` that lies in ``folder``: anything that returns ``logits``
    [1, T, vocab] of token ids [1, T]."""
    vocab = model.config.get_text_config().vocab_size
    prompts = [tokens(count, vocab) for count in (45, 2, 29)]
    for page_size, chunk in _PAGES_AND_CHUNKS:
        check_chunks(load_runner(server_config(folder, page_size=page_size)), model, prompts, chunk, tolerance)
    check_prefix(folder, model, vocab, tolerance)
    check_greedy(folder, model, vocab)
    if tp:
        check_ranks(folder, model, vocab, tp, tolerance)


def tokens(count: int, vocab: int = VOCAB) -> np.ndarray:
    """Returns random tokens [count]."""
    return np.random.default_rng((SEED, count)).integers(0, vocab, count)


def check_prefix(folder: Path, model: Any, vocab: int, tolerance: float) -> None:
    """Two prompts over the pages of one prefix, in one batch with a third that is all new."""
    runner = load_runner(server_config(folder, page_size=16))
    pages = scattered_pages(runner, 3, 64)
    prefix, tails, other = tokens(32, vocab), [tokens(9, vocab), tokens(17, vocab)], tokens(25, vocab)
    forward(runner, [(prefix, 0, pages[0])])
    shared = [np.concatenate((pages[0][:2], pages[b][2:])) for b in (0, 1)]
    got = forward(runner, [(tails[0], 32, shared[0]), (other, 0, pages[2]), (tails[1], 32, shared[1])])
    of_tails = [expected_logits(model, np.concatenate((prefix, tail)))[32:] for tail in tails]
    want = torch.cat((of_tails[0], expected_logits(model, other), of_tails[1]))
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)


def check_greedy(folder: Path, model: Any, vocab: int) -> None:
    """Tokens of the unified scheduler, over chunks and a prefix cache, are transformers' own."""
    engine = Engine(folder, page_size=4, chunk=16)
    long = tokens(33, vocab).tolist()
    prompts = [long[:3], long[:21], long]
    stops = set(engine.tracker.eos_ids)
    for wave in (prompts[:2], prompts[2:]):  # the last finds pages of those before
        for prompt in wave:
            engine.start(str(len(prompt)), prompt, max_new_tokens=_GREEDY)
        found = tokens_of(engine.run())
        for prompt in wave:
            want = greedy(model, prompt, _GREEDY)
            end = next((i + 1 for i, token in enumerate(want) if token in stops), _GREEDY)
            assert found[str(len(prompt))] == want[:end]


def check_ranks(folder: Path, model: Any, vocab: int, tp: int, tolerance: float) -> None:
    """Logits of a prompt and of a decode step on each of ``tp`` ranks, which are threads."""
    prompt = tokens(30, vocab)
    want = expected_logits(model, prompt)

    def compute(group: Any) -> torch.Tensor:
        runner = load_runner(server_config(folder, tp=tp), Parallel(group))
        pages = scattered_pages(runner, 1, len(prompt))[0]
        parts = [(prompt[:-1], 0, pages), (prompt[-1:], len(prompt) - 1, pages)]
        return torch.cat([forward(runner, [part]) for part in parts])

    for got in on_ranks(tp, compute):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
