"""Measures a server: prompts alone, prompts that queue, decode batches, bursts of short prompts, and a pair.

All over HTTP and through the streams that a client gets, so that any server of ours can be measured as it runs.
"""

from __future__ import annotations

import json
import random
import re
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...common.api.errors import ConfigError
from ...common.bench.client.answer import Answer
from ...common.bench.client.apis import APIS, RequestOptions
from ...common.bench.client.client import Client
from ...common.bench.client.control import Control
from ...common.bench.client.load import Load
from ...common.bench.client.server_sender import ServerSender
from ...common.bench.workloads.vocabulary import Vocabulary
from ...common.bench.workloads.workload import single
from .args import Calibrate, sizes
from .samples import BurstSample, DecodeSample, PrefillSample, PromptSample, Samples

STEP_GAP_SHARE = 0.3
"""First tokens that are closer than this share of the longest time between two come from one step."""
DECODE_STEPS = 40
QUEUED_STEPS = 7
ALTERNATING = 16


class Measurement:
    """One server under one client."""

    def __init__(self, config: Calibrate, url: str, samples: Samples):
        args, headers = config.calibrate, config.target.headers
        self.samples = samples
        self._args = args
        self._control = Control(url, headers)
        self._control.wait_ready(config.target.ready_check_timeout_sec)
        info = self._control.model_info()
        self._vocabulary = Vocabulary(int(info.get("vocab_size") or 32000), None, as_ids=True)
        self._rng = random.Random(args.seed)
        self._client = Client(url, headers, config.target.request_timeout, time.perf_counter)
        self._sender = ServerSender(self._client, APIS["baton"], RequestOptions())
        self._read_info(url, headers)

    def _read_info(self, url: str, headers: dict[str, str]) -> None:
        """Read the server's description of itself."""
        found = read_json(url + "/get_server_info", headers)
        samples = self.samples
        samples.kv_tokens = int(found.get("max_total_num_tokens") or samples.kv_tokens)
        samples.page_size = int(found.get("page_size") or samples.page_size)
        chunk = int(found.get("chunked_prefill_size") or samples.chunk)
        samples.chunk = chunk if chunk > 0 else 1 << 20
        samples.model = str(found.get("model_path") or samples.model)

    @property
    def most_tokens(self) -> int:
        """Tokens of KV cache to use."""
        return int(self.samples.kv_tokens * 0.9) if self.samples.kv_tokens else 1 << 20

    async def ask(self, lengths: Sequence[int], output_len: int, clients: int | None = None) -> list[Answer]:
        """Send prompts of these lengths at once, or by ``clients`` clients; raises ConfigError where one is not
        answered."""
        made = [single(self._vocabulary.prompt(self._vocabulary.draw(self._rng, length, words=False)), output_len)
                for length in lengths]
        load = Load(self._sender, time.perf_counter, max_concurrency=clients)
        await load.run(made, [0.0] * len(made))
        for answer in load.answers:
            if answer.failure is not None or answer.first is None:
                why = answer.failure.message if answer.failure else "no token came"
                raise ConfigError(f"The server did not answer a prompt of {answer.prompt.num_tokens} tokens: {why}")
        return load.answers

    def close(self) -> None:
        self._client.close()

    async def warm_up(self) -> None:
        self._control.flush_cache()  # of an earlier calibration with the same seed
        for length in sizes(self._args.max_context, 64, 1024):
            await self.ask([length], 8)
        await self.ask([64] * min(self._args.max_batch, 64), 16)

    async def prompts(self, into: list[PromptSample]) -> None:
        for length in sizes(self._args.max_context, 32, 256, 1024, 2048, 4096, 8192):
            for _ in range(self._args.repeats):
                [answer] = await self.ask([length], 1)
                assert answer.ttft is not None
                into.append(PromptSample(length, answer.ttft * 1e3))

    async def queued_prompts(self) -> None:
        """Steps by the times of the first tokens: those of one step come together, and while prompts queue a step
        follows the one before at once."""
        chunk = self.samples.chunk
        for length in (chunk // 16, chunk // 4, chunk):
            if not 16 <= length <= self._args.max_context:
                continue
            answers = await self.ask([length] * (QUEUED_STEPS * chunk // length), 1)
            self.samples.prefill += [step for step in steps_of(answers, length) if step.tokens == chunk]

    async def alternating_prompts(self) -> None:
        """Steps of one prompt each, back to back: of two clients one always waits."""
        for length in (256, 512, 2048):
            if length <= self._args.max_context:
                answers = await self.ask([length] * ALTERNATING, 1, clients=2)
                self.samples.prefill += [step for step in steps_of(answers, length) if step.tokens == length]

    async def decode(self) -> None:
        for context in sorted({min(context, self._args.max_context) for context in (64, 1024, 4096)}):
            for rows in sizes(self._args.max_batch, 1, 4, 16, 32, 64, 128):
                if rows * (context + 2 * DECODE_STEPS) > self.most_tokens:
                    continue
                if context > 64 and rows not in (1, 16, 64, self._args.max_batch):
                    continue
                answers = await self.ask([context] * rows, 2 * DECODE_STEPS)
                if (sample := step_of(answers, context)) is not None:
                    self.samples.decode.append(sample)

    async def bursts(self) -> None:
        for count in (32, 96):
            answers = await self.ask([16] * count, 1)
            last = max(answer.first or 0.0 for answer in answers) - min(answer.sent for answer in answers)
            self.samples.bursts.append(BurstSample(count, 16, last * 1e3))


def steps_of(answers: Sequence[Answer], length: int) -> list[PrefillSample]:
    """The steps that computed whole prompts of one length, without the first ones and the last, before and after which
    no prompts wait. Where steps cut prompts, the numbers of prompts that end with a step are not its tokens."""
    times = np.sort([answer.first for answer in answers]) * 1e3
    gaps = np.diff(times)
    begins = np.concatenate(([0], 1 + np.flatnonzero(gaps > STEP_GAP_SHARE * gaps.max(initial=0.0))))
    ends = [*begins[1:].tolist(), len(times)]
    found = []
    steps = [(float(times[begin]), end - begin) for begin, end in zip(begins.tolist(), ends)]
    for (before, _), (at, count) in zip(steps[1:-2], steps[2:-1]):
        found.append(PrefillSample(count * length, count * length * length / 2, at - before))
    return found


def step_of(answers: Sequence[Answer], context: int) -> DecodeSample | None:
    """The median step while all requests decode; None where they did not do so for long."""
    times = [answer.first + np.concatenate(([0.0], np.cumsum(answer.gaps)))
             for answer in answers if answer.first is not None]
    begin, end = max(column[0] for column in times), min(column[-1] for column in times)
    steps = times[0][(times[0] > begin) & (times[0] < end)][1:-1]
    if len(steps) < DECODE_STEPS // 2:
        return None
    every = float(np.median(np.diff(steps)))
    # Streams have begun in different steps: those events belong together that are less than half a step apart.
    late = np.array([column[np.searchsorted(column, steps - every / 2)] - steps for column in times])
    spread = float(np.median(late.max(0) - late.min(0)))
    done = sum(int(np.searchsorted(column, steps[len(steps) // 2])) for column in times)
    return DecodeSample(len(answers), len(answers) * context + done, every * 1e3, spread * 1e3)


async def measure_server(config: Calibrate, samples: Samples) -> None:
    """Everything but transfers."""
    measurement = Measurement(config, config.target.url, samples)
    try:
        await measurement.warm_up()
        for name, part in (("prompts alone", measurement.prompts(samples.prompts)),
                           ("prompts that queue", measurement.queued_prompts()),
                           ("prompts in turn", measurement.alternating_prompts()),
                           ("decode batches", measurement.decode()), ("bursts", measurement.bursts())):
            begin = time.monotonic()
            await part
            print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    finally:
        measurement.close()


async def measure_pair(config: Calibrate, samples: Samples) -> None:
    """Prompts alone through a pair, and its prefill server's counters."""
    args = config.calibrate
    assert args.pair_url is not None and args.prefill_url is not None
    kept = samples.kv_tokens
    measurement = Measurement(config, args.pair_url.rstrip("/"), samples)
    samples.kv_tokens = kept or samples.kv_tokens
    try:
        await measurement.warm_up()
        before = write_counters(args.prefill_url, config.target.headers)
        await measurement.prompts(samples.pair)
        after = write_counters(args.prefill_url, config.target.headers)
    finally:
        measurement.close()
    samples.written, samples.write_seconds = after[0] - before[0], after[1] - before[1]
    samples.written_tokens = sum(sample.tokens for sample in samples.pair)


def write_counters(url: str, headers: dict[str, str]) -> tuple[float, float]:
    """Bytes and seconds of writes, of all ranks, by a prefill server's metrics. Raises ConfigError."""
    request = urllib.request.Request(url.rstrip("/") + "/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
    except OSError as error:
        raise ConfigError(f"--prefill-url {url} does not answer: {error}.") from None
    found = []
    for name in ("kv_bytes_sent", "kv_write_seconds"):
        values = re.findall(rf"^\S*{name}\S*(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if not values:
            raise ConfigError(f"--prefill-url {url} has no metric {name}: name a prefill server of ours.")
        found.append(sum(map(float, values)))
    return found[0], found[1]


def read_json(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """A server's JSON; empty where it has none."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
