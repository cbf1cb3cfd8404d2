"""A server with a real front and a fake engine: it answers with the prompt, one token a step, then ends with EOS.

Run as a script it is a server (all flags of ServerConfig). ``seed`` makes a request misbehave, see ``Seed``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from enum import IntEnum
from pathlib import Path

import zmq

from baton.common.api.errors import ConfigError
from baton.common.api.messages import (
    Abort,
    Control,
    Done,
    Failed,
    Finish,
    FromEngine,
    Generate,
    GetState,
    Loading,
    Logprobs,
    Output,
    OutputBatch,
    OutputExtras,
    PromptUsage,
    RankTotals,
    Ready,
    Shutdown,
    StartFailed,
    State,
    ToEngine,
    decode_to_engine,
    encode,
)
from baton.common.config.cli import parse
from baton.common.config.server import ServerConfig
from baton.common.engine.rank_spec import RankSpec
from baton.common.serving.server import run_server

EOS = 2
CONTEXT = 512
STEP_SECONDS = float(os.environ.get("FAKE_ENGINE_STEP_SECONDS", 0.002))
TEMPLATE = (
    "{% if messages[0].role == 'forbidden' %}{{ raise_exception('No such role.') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if tools %}{% for t in tools %} {{ t.function.name }}{% endfor %}{% endif %}"
)


class Seed(IntEnum):
    """Seeds that make a request misbehave."""

    FAIL_FIRST = 9001
    """Fails before its first token."""
    FAIL_LATER = 9002
    """Fails behind its second token."""
    DIE = 9003
    """The rank's process ends."""
    SILENT = 9004
    """Never answers."""


def make_checkpoint(folder: Path, chat_template: str | None = TEMPLATE) -> Path:
    """A Qwen3 config and a byte-level BPE tokenizer of a few hundred tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<start>", "<end>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["hello world, the quick brown fox jumps over the lazy dog"] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": len(fast), "eos_token_id": EOS,
        "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "torch_dtype": "float32"}))
    return folder


class Channel:
    """A rank's end, as common.engine.channel has it, but without the torch that importing that costs."""

    def __init__(self, spec: RankSpec):
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(spec.from_engine)
        self._inbox = self._context.socket(zmq.PULL)
        if spec.rank == 0:
            self._inbox.connect(spec.to_engine)

    def send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))

    def receive(self, wait_ms: int) -> Iterator[ToEngine]:
        wait = wait_ms
        while self._inbox.poll(wait):
            yield decode_to_engine(self._inbox.recv())
            wait = 0

    def close(self) -> None:
        self._context.destroy(linger=1000)


class EchoEngine:
    def __init__(self, channel: Channel, spec: RankSpec):
        self._channel = channel
        self._mode = spec.config.mode
        self._others = spec.world_size - 1
        self._running: dict[str, tuple[Generate, int]] = {}
        self._counters = {"finished_requests": 0.0, "aborted_requests": 0.0}

    def run(self) -> None:
        while True:
            for message in self._channel.receive(2 if self._running else 100):
                match message:
                    case Shutdown():
                        return
                    case Generate():
                        self._start(message)
                    case Abort(rid, silent):
                        for name in [rid] if rid else list(self._running):
                            self._abort(name, silent)
                    case Control(seq):
                        idle = not self._running
                        done = Done(seq, "Done.") if idle else Done(seq, "Requests run.", "conflict")
                        self._channel.send(done)
                    case GetState(seq):
                        self._channel.send(State(seq, 10, 10, 0, 0, 16, len(self._running), 0, 0, dict(self._counters),
                                                 {"token_usage": 0.0}))
                        for _ in range(self._others):
                            self._channel.send(RankTotals(seq, 0, {}))
            self._step()

    def _start(self, request: Generate) -> None:
        seed = request.sampling.seed
        if seed == Seed.DIE:
            raise SystemExit(7)
        if seed == Seed.FAIL_FIRST:
            self._channel.send(Failed(request.rid, "kv_transfer_failed", "The prefill server vanished."))
        else:
            self._running[request.rid] = (request, 0)

    def _abort(self, rid: str, silent: bool) -> None:
        if (found := self._running.pop(rid, None)) is not None:
            self._counters["aborted_requests"] += 1
            if not silent:
                extras = OutputExtras(PromptUsage(len(found[0].input_ids), 1), Finish("abort"))
                self._channel.send(OutputBatch.of([Output(rid, [], extras)]))

    def _step(self) -> None:
        outputs = []
        for rid, (request, done) in list(self._running.items()):
            if request.sampling.seed == Seed.SILENT:
                continue
            if request.sampling.seed == Seed.FAIL_LATER and done == 2:
                del self._running[rid]
                self._channel.send(Failed(rid, "kv_transfer_failed", "The prefill server vanished."))
                continue
            outputs.append(self._output(request, done))
            if outputs[-1].finish is not None:
                del self._running[rid]
                self._counters["finished_requests"] += 1
            else:
                self._running[rid] = (request, done + 1)
        if outputs:
            self._channel.send(OutputBatch.of(outputs))
            time.sleep(STEP_SECONDS)

    def _output(self, request: Generate, done: int) -> Output:
        sampling, prompt = request.sampling, request.input_ids
        token = prompt[done % len(prompt)] if done < len(prompt) or sampling.ignore_eos else EOS
        total = done + 1
        finish = None
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            finish = Finish("stop", token)
        elif total >= sampling.max_new_tokens or self._mode == "prefill":
            finish = Finish("length")
        if sampling.max_new_tokens == 0:
            return Output(request.rid, [], OutputExtras(PromptUsage(len(prompt), 1), Finish("length")))
        logprobs = prompt_logprobs = None
        if request.return_logprob:
            top = [(token, -0.5), (EOS, -float("inf"))][: request.top_logprobs_num]
            logprobs = Logprobs([token], [-0.5], [top] if top else [])
            start = request.logprob_start_len
            if done == 0 and start >= 0:
                values = [None] * (start == 0) + [-1.0] * (len(prompt) - max(start, 1))
                prompt_logprobs = Logprobs(prompt[start:], values)
        usage = None if done else PromptUsage(len(prompt), 1)
        return Output(request.rid, [token], OutputExtras(usage, finish, logprobs, prompt_logprobs))


def rank_main(spec: RankSpec) -> None:
    channel = Channel(spec)
    if spec.config.model.random_seed == 13:
        channel.send(StartFailed("The fake engine was told to fail."))
        channel.close()
        raise SystemExit(1)
    if spec.rank > 0:  # nothing to do: wait for the end, as a rank waits in a collective
        while True:
            time.sleep(1)
    channel.send(Loading("loading weights", 0.5))
    time.sleep(spec.config.model.random_seed / 100)
    channel.send(Ready(10_000, CONTEXT))
    EchoEngine(channel, spec).run()
    channel.close()


@asynccontextmanager
async def service(config: ServerConfig) -> AsyncIterator[None]:
    """Runs beside the server and says so."""
    if config.model.random_seed == 14:
        raise ConfigError("The service was told to fail.")
    print("service started", file=sys.stderr, flush=True)
    yield
    print("service stopped", file=sys.stderr, flush=True)


def main() -> int:
    config = parse(ServerConfig, prog="fake", description="Fake server.")
    return run_server(config, rank_main, services=[lambda: service(config)])


if __name__ == "__main__":
    sys.exit(main())
