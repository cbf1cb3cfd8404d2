"""What speculation is worth behind a router: decoding of a unified server and of a pair on two GPUs, plain and with it.

    python -m baton.tests.bench.relay_speculation --out FILE.json [--streams 1,16,64] [--drafts 1:7,16:5,64:3]
        [--only unified,1P1D] [--server-flags "..."]

Dummy weights of llama-8b and a draft model, whose acceptance is drawn. So many streams begin together; counted are the
tokens of all from the last one's first token to the first one's end, when nothing but decoding happens. The gain of a
server is its rate with drafts by that without; a pair should have 98 % of a unified server's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import uvloop

from ...common.bench.client.answer import Answer
from ...common.bench.workloads.dataset_args import DatasetArgs
from . import load
from .relay import relay, unified
from .speculation_models import MODELS, SHARES

PROMPT = 1536
OUTPUT = {1: 512, 16: 1024, 64: 1536}
"""Tokens of an answer by streams: more than are written until all have begun."""


def steady_rate(answers: Sequence[Answer]) -> dict[str, float]:
    """Tokens a second while all answers were being written. An event brings as many tokens as another in the mean."""
    assert all(answer.failure is None for answer in answers), [answer.failure for answer in answers]
    assert all(answer.first and answer.last for answer in answers)
    begin = max(answer.first or 0.0 for answer in answers)
    end = min(answer.last or 0.0 for answer in answers)
    assert end > begin, "an answer has ended before the last one began: ask for more tokens"
    tokens = events = 0.0
    for answer in answers:
        times = accumulate(answer.gaps, initial=answer.first or 0.0)
        count = sum(begin < time <= end for time in times)
        events += count
        tokens += count * (answer.num_output_tokens - 1) / max(1, answer.num_events - 1)
    steps = [answer.drafted.num_steps for answer in answers if answer.drafted]
    written = sum(answer.num_output_tokens - 1 for answer in answers)
    return {"tok_s": tokens / (end - begin), "seconds": end - begin,
            "event_ms": 1e3 * (end - begin) * len(answers) / events,
            "tokens_a_step": written / sum(steps) if steps else 1.0}


def ask(url: str, streams: int, output: int, prompt: int, vocab: int) -> dict[str, float]:
    data = DatasetArgs(dataset_name="random-ids", num_prompts=streams, random_input_len=prompt,
                       random_output_len=output, random_range_ratio=1.0, seed=streams)
    return steady_rate(uvloop.run(load.ask(url, data, concurrency=streams, vocab=vocab)).answers)


def rows_of(name: str, drafts: dict[int, int], speculates: bool, args: argparse.Namespace, flags: list[str],
            logs: Path) -> list[dict[str, Any]]:
    """Measures all numbers of streams: with drafts by one server for each number of drafts."""
    rows = []
    for count in sorted(set(drafts.values())) if speculates else [0]:
        own = flags
        if count:
            shares = ",".join(map(str, SHARES[:count]))
            own = [*flags, "--speculative-num-steps", str(count), "--speculative-simulate-acceptance", shares]
        folder = logs / f"{name}-{count}"
        folder.mkdir(parents=True, exist_ok=True)
        with unified(own, folder) if name == "unified" else relay(own, folder, args.gpus) as url:
            ask(url, 2, 24, 64, args.vocab)  # warm-up
            for streams in (streams for streams, of in drafts.items() if of == count or not count):
                output = args.output or OUTPUT.get(streams, 1024)
                found = ask(url, streams, output, args.prompt, args.vocab)
                rows.append({"server": name, "streams": streams, "drafts": count, **found})
                print({key: round(value, 2) if isinstance(value, float) else value for key, value in rows[-1].items()},
                      flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Each server's rates and gains, and the share of a unified server's gain that a pair has."""
    lines = ["| streams | drafts | unified tok/s plain | with drafts | gain | 1P1D tok/s plain | with drafts | gain | "
             "of unified's |", "|---" * 9 + "|"]
    rate = {(row["server"], row["streams"], row["drafts"] > 0): row["tok_s"] for row in rows}
    for streams, count in sorted({(row["streams"], row["drafts"]) for row in rows if row["drafts"]}):
        cells, gains = [], []
        for name in ("unified", "1P1D"):
            plain, own = (rate.get((name, streams, drafts)) for drafts in (False, True))
            gains.append(own / plain if plain and own else None)
            cells += [f"{value:,.0f}" if value else "" for value in (plain, own)]
            cells.append(f"{gains[-1]:.2f}" if gains[-1] else "")
        share = f"{gains[1] / gains[0]:.1%}" if gains[0] and gains[1] else ""
        lines.append("| " + " | ".join([str(streams), str(count), *cells, share]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="llama-8b", choices=MODELS)
    parser.add_argument("--drafts", default="1:7,16:5,64:3", help="STREAMS:DRAFTS, by how many streams are served")
    parser.add_argument("--only", default="unified,1P1D")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--output", type=int, help="tokens of each answer, in place of those by streams")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--server-flags", default="", help="further flags of all servers")
    args = parser.parse_args()
    import torch

    args.gpus = (0, 0) if torch.cuda.device_count() < 2 else (0, 1)
    args.vocab = MODELS[args.model].shape["vocab_size"]
    drafts = {int(streams): int(count) for streams, count in (pair.split(":") for pair in args.drafts.split(","))}
    logs = args.logs or Path(tempfile.mkdtemp())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model, speculative = MODELS[args.model].write(Path(folder))
        flags = [*model, "--tokenizer-path", "tinychat", "--served-model-name", "dummy", "--disable-radix-cache",
                 "--max-running-requests", str(max(drafts)), *args.server_flags.split()]
        for name in args.only.split(","):
            for own in ([], speculative):
                rows += rows_of(name, drafts, bool(own), args, [*flags, *own], logs)
                args.out.write_text(json.dumps({"model": args.model, "command": sys.argv[1:], "rows": rows}, indent=1))
    print(f"\n{args.model}, prompts of {args.prompt}, SIMULATED acceptance, {os.cpu_count()} cores\n{table(rows)}")


if __name__ == "__main__":
    main()
