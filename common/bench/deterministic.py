"""``bench_deterministic``: sends the same prompts in batches of different sizes and counts different answers.

The protocol is that of SGLang's ``sglang.test.test_deterministic``, with its modes; here every answer of a batch
counts, not its first alone.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from ..api.errors import ConfigError
from ..config.cli import parse
from .client.control import Control
from .command import reported
from .deterministic_args import DeterministicArgs

PROMPT = "Tell me about Richard Feynman: "
PREFIX_CHARACTERS = (1, 511, 2048, 4097)
"""Characters of the prompts that begin alike."""
_WARM_UPS, _WARM_UP_REQUESTS = 3, 16
_WORDS = ("a the one some old new small large red green quick slow river house garden letter number answer city "
          "teacher child captain engine winter morning asks finds opens counts reads builds and but then").split()

Answer = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(DeterministicArgs, argv, prog="bench_deterministic", description=(
        "Check that a server's answers do not depend on what it computes beside them."))
    sys.exit(reported("bench_deterministic", lambda: run(args)))


def run(args: DeterministicArgs) -> int:
    """Sends and counts. Returns 1 where equal requests had different answers. Raises ConfigError."""
    control = Control(args.url, args.headers)
    control.wait_ready(args.ready_check_timeout_sec)
    _wait_loaded(args)
    for _ in range(_WARM_UPS):
        _generate(args, [PROMPT] * _WARM_UP_REQUESTS)
    mode = {"single": _single, "prefix": _prefix, "radix_cache": _radix_cache}[args.test_mode]
    return int(any(unique != 1 for unique in mode(args, control)))


def _wait_loaded(args: DeterministicArgs) -> None:
    """Returns once the server answers requests: it lists its models before it has loaded them."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            _ask(args, [PROMPT])
            return
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() >= deadline:
                raise _refusal(error) from None
        time.sleep(0.5)


def _single(args: DeterministicArgs, control: Control) -> list[int]:
    """One prompt in batches of growing size."""
    samples = []
    for size in range(args.n_start, args.n_start + args.n_trials):
        answers = _generate(args, [PROMPT] * size)
        samples += [_sample(args, answer) for answer in answers]
        print(f"Batch of {size}: {answers[0]['text']!r}", flush=True)
    return [_report("", samples)]


def _prefix(args: DeterministicArgs, control: Control) -> list[int]:
    """Prompts that begin alike, in random batches, each of which begins without cached pages."""
    draw, text = random.Random(args.sampling_seed), long_text(max(PREFIX_CHARACTERS))
    samples: dict[int, list[str]] = {length: [] for length in PREFIX_CHARACTERS}
    for size in range(args.n_start, args.n_start + args.n_trials):
        control.flush_cache()
        lengths = [draw.choice(PREFIX_CHARACTERS) for _ in range(size)]
        for length, answer in zip(lengths, _generate(args, [text[:length] for length in lengths])):
            samples[length].append(_sample(args, answer))
        print(f"Batch of {size}: " + ", ".join(f"{lengths.count(length)} of {length} characters"
                                               for length in PREFIX_CHARACTERS), flush=True)
    return [_report(f"Prompt of {length} characters: ", found) for length, found in samples.items() if found]


def _radix_cache(args: DeterministicArgs, control: Control) -> list[int]:
    """The log-probabilities of an answer's tokens: as they were decoded, then as those of a prompt that ends with them,
    without cached pages, and with those of the first half of it."""
    unique = []
    for trial in range(args.n_start, args.n_start + args.n_trials):
        prompt = long_text(trial * 97 % max(PREFIX_CHARACTERS) + 1)
        control.flush_cache()
        (decoded,) = _generate(args, [prompt], return_logprob=True)
        (asked,) = _generate(args, [prompt], return_logprob=True, logprob_start_len=0, max_new_tokens=1)
        prompt_ids = [entry[1] for entry in asked["meta_info"]["input_token_logprobs"]]
        values = decoded["meta_info"]["output_token_logprobs"]
        ids = prompt_ids + [entry[1] for entry in values]
        control.flush_cache()
        samples = [_values(values), _as_prompt(args, ids, len(prompt_ids))]
        control.flush_cache()
        _generate(args, [ids[:len(ids) // 2]], max_new_tokens=1)
        samples.append(_as_prompt(args, ids, len(prompt_ids)))
        unique.append(_report(f"Prompt of {len(prompt_ids)} tokens: ", samples))
    return unique


def _as_prompt(args: DeterministicArgs, ids: list[int], start: int) -> str:
    """Returns the log-probabilities of ``ids`` from ``start`` on, computed as a prompt."""
    (answer,) = _generate(args, [ids], return_logprob=True, logprob_start_len=start - 1, max_new_tokens=1)
    return _values(answer["meta_info"]["input_token_logprobs"][1:])


def _values(entries: Sequence[Sequence[Any]]) -> str:
    return json.dumps([entry[:2] for entry in entries])


def _sample(args: DeterministicArgs, answer: Answer) -> str:
    """Returns what is compared of an answer."""
    return str(answer["text"]) + (_values(answer["meta_info"]["output_token_logprobs"]) if args.return_logprob else "")


def _report(what: str, samples: Sequence[str]) -> int:
    unique = len(set(samples))
    print(f"{what}Total samples: {len(samples)}, Unique samples: {unique}", flush=True)
    return unique


def long_text(characters: int) -> str:
    """Returns the first ``characters`` of a text of random words, always the same."""
    draw, words = random.Random(0), []
    for _ in range(characters // 3 + 1):
        words.append(draw.choice(_WORDS))
    return " ".join(words)[:characters]


def _generate(args: DeterministicArgs, prompts: Sequence[str | list[int]], **fields: Any) -> list[Answer]:
    """Returns the answers to ``prompts``; see ``_ask``. Raises ConfigError."""
    try:
        return _ask(args, prompts, **fields)
    except urllib.error.HTTPError as error:
        raise _refusal(error) from None


def _ask(args: DeterministicArgs, prompts: Sequence[str | list[int]], *, max_new_tokens: int | None = None,
         **fields: Any) -> list[Answer]:
    """Returns the answers to ``prompts``, texts or token ids, sent as one request."""
    sampling = {"temperature": args.temperature, "max_new_tokens": max_new_tokens or args.max_new_tokens,
                "frequency_penalty": args.frequency_penalty, "presence_penalty": args.presence_penalty,
                "sampling_seed": args.sampling_seed}
    body = {"text" if isinstance(prompts[0], str) else "input_ids": prompts, "sampling_params": sampling,
            "return_logprob": args.return_logprob, **fields}
    request = urllib.request.Request(args.url + "/generate", json.dumps(body).encode(),
                                     {**args.headers, "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=args.request_timeout) as response:
        found: list[Answer] = json.load(response)
    return found


def _refusal(error: urllib.error.HTTPError) -> ConfigError:
    return ConfigError(f"/generate answers HTTP {error.code}: {error.read().decode(errors='replace')[:300]}")
