"""``bench_serving``'s client as rows of a table: closed loop or Poisson arrivals of random token ids, on /generate.

Times are in milliseconds; see ``common/bench/client/answer.py`` for what they are.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from ...common.bench.client.apis import APIS, RequestOptions
from ...common.bench.client.client import Client
from ...common.bench.client.load import Load
from ...common.bench.client.server_sender import ServerSender
from ...common.bench.report.figures import figures
from ...common.bench.workloads.arrivals import arrivals
from ...common.bench.workloads.dataset_args import DatasetArgs
from ...common.bench.workloads.datasets import make_workload
from ...common.bench.workloads.vocabulary import Vocabulary
from ...common.garbage_collector import freeze_collector


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of ``input_tokens``, each answered with exactly ``output_tokens`` tokens.

    ``rate`` (requests a second) makes it an open loop; then ``concurrency`` is not used.
    """

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int = 1
    rate: float | None = None

    @property
    def name(self) -> str:
        load = f"c={self.concurrency}" if self.rate is None else f"{self.rate:g} req/s"
        return f"{self.input_tokens}/{self.output_tokens}, {self.requests}, {load}"


async def ask(url: str, data: DatasetArgs, *, concurrency: int | None = None, rate: float | None = None,
              vocab: int = 4000) -> Load:
    """Send what ``data`` says to ``url``'s /generate, as token ids below ``vocab``; the load has the answers."""
    conversations = make_workload(data, Vocabulary(vocab, None, as_ids=True))
    client = Client(url, {}, 600.0, time.perf_counter)
    freeze_collector()  # with torch loaded, a full collection would stop this clock's events for 80 ms
    load = Load(ServerSender(client, APIS["baton"], RequestOptions()), time.perf_counter, max_concurrency=concurrency)
    await load.run(conversations, arrivals(conversations, rate, random.Random(data.seed)))
    client.close()
    return load


async def run(url: str, work: Workload, *, vocab: int = 4000, seed: int = 0) -> dict[str, float | str | int]:
    """Run a workload against ``url``; returns one row of figures. Answers that are too short count as failed."""
    data = DatasetArgs(dataset_name="random-ids", num_prompts=work.requests, random_input_len=work.input_tokens,
                       random_output_len=work.output_tokens, random_range_ratio=1.0, seed=seed)
    load = await ask(url, data, concurrency=work.concurrency if work.rate is None else None, rate=work.rate,
                     vocab=vocab)
    found = figures(load.answers, load.duration)
    errors = [answer.failure.message for answer in load.answers if answer.failure is not None]
    if found.short:
        errors.append(f"{found.short} answers with fewer than {work.output_tokens} tokens")
    return {
        "workload": work.name, "failed": found.num_failed + found.short, "first_error": errors[0] if errors else "",
        "req_s": found.rate(found.completed), "in_tok_s": found.rate(found.input_tokens),
        "out_tok_s": found.rate(found.output_tokens),
        **{f"{name}_p{percent}": getattr(getattr(found, name), f"p{percent}")
           for name in ("ttft", "tpot", "itl") for percent in (50, 99)},
    }


COLUMNS = ("req_s", "in_tok_s", "out_tok_s", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p50", "itl_p99")


def table(rows: list[dict]) -> str:
    """Rows with a ``server`` key as a Markdown table; times in ms."""
    lines = ["| server | workload | failed | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 3)]
    for row in rows:
        told = " | ".join(f"{row[c]:,.1f}" for c in COLUMNS)
        lines.append(f"| {row['server']} | {row['workload']} | {row['failed']} | {told} |")
    return "\n".join(lines)
