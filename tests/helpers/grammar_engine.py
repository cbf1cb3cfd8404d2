"""An engine in this process that answers by grammars, stepped by hand, and prompts for the shipped chat model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from baton.common.api.grammar import GrammarSpec, Vocabulary
from baton.common.api.messages import Failed, Generate, OutputBatch, PrepareGrammar
from baton.common.api.sampling import SamplingParams
from baton.common.config.cli import build
from baton.common.config.server import ModelArgs, ScheduleArgs, ServerConfig
from baton.common.distributed.parallel import Parallel
from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.common.execution.executor import Executor
from baton.common.grammar.store import GrammarStore
from baton.common.kvcache.manager import KVCacheManager
from baton.common.models.registry import load_model_spec
from baton.common.runner.model_runner import ModelRunner
from baton.common.sampling.sampler import Sampler
from baton.common.scheduler.batcher import Batcher
from baton.common.scheduler.request_tracker import RequestTracker
from baton.common.tinychat import CHECKPOINT
from baton.common.tokenizer.tokenizer import Tokenizer, load_tokenizer


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer("tinychat")


@cache
def vocabulary() -> Vocabulary:
    spec = load_model_spec(ModelArgs(model_path=str(CHECKPOINT)))
    return Vocabulary([tokenizer().token_bytes(token) for token in range(spec.vocab_size)],
                      sorted(tokenizer().special_ids), list(spec.eos_token_ids))


def chat_ids(question: str) -> list[int]:
    text = tokenizer().render_chat([{"role": "user", "content": question}], tools=None, continue_final_message=False,
                                   options={})
    return tokenizer().encode(text, add_special_tokens=False)


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


@cache
def _runner(max_total_tokens: int) -> ModelRunner:
    config = build(ServerConfig, {"model_path": str(CHECKPOINT), "page_size": 8, "max_total_tokens": max_total_tokens})
    return ModelRunner.load(config, load_model_spec(config.model), Parallel(), "cpu", lambda what, share: None)


class GrammarEngine:
    """A unified scheduler over tinychat, or ``runner``. ``run`` returns the output's token ids of each request, or its
    error."""

    def __init__(self, *, overlap: bool = False, max_total_tokens: int = 65_536, chunk: int = 8192,
                 whitespace: str | None = None, max_running: int = 256, runner: ModelRunner | None = None,
                 tokens: Vocabulary | None = None, backend: str = "xgrammar"):
        runner = runner or _runner(max_total_tokens)
        schedule = ScheduleArgs(chunked_prefill_size=chunk, max_running_requests=max_running,
                                schedule_conservativeness=0.0)
        self.cache = KVCacheManager(runner.num_pages, runner.layout.page_size, groups=runner.new_cache_groups())
        self.sent: list[Any] = []
        self.tracker = RequestTracker(self.sent.append, eos_ids=frozenset(runner.spec.eos_token_ids),
                                      vocab_size=runner.spec.vocab_size, max_request_tokens=max_total_tokens,
                                      max_requests=1024, timeout=1e9)
        self.store = GrammarStore(whitespace, runner.spec.vocab_size, self.tracker.eos_ids, backend)
        self.store.prepare(PrepareGrammar(0, GrammarSpec("regex", "x"), tokens or vocabulary()))
        executor = Executor(runner, Sampler(runner.spec.vocab_size, runner.device, 0), self.store)
        self.scheduler = UnifiedScheduler(Batcher(self.cache, schedule), executor, self.tracker, overlap=overlap)
        self.reasons: dict[str, str] = {}

    def start(self, rid: str, grammar: GrammarSpec | None, question: str = "What is the capital of France?", *,
              answered: tuple[int, ...] = (), **sampling: Any) -> None:
        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 400, "grammar": grammar} | sampling)
        message = Generate(rid, [*chat_ids(question), *answered], params, num_answered=len(answered))
        req = self.tracker.accept(message, now=float(len(self.tracker.live)))
        assert req is not None, self.sent
        if grammar is not None:
            req.matcher = self.store.matcher(req, req.num_prompt_tokens - len(answered))
        self.scheduler.add(req)

    def run(self) -> dict[str, list[int] | Failed]:
        while self.scheduler.step(0.0):
            self.tracker.flush()
        assert self.scheduler.idle and not self.tracker.live
        self.cache.check_integrity()
        assert self.cache.num_allocated == 0
        found: dict[str, Any] = {}
        for message in self.sent:
            if isinstance(message, Failed):
                found[message.rid] = message
            for output in message.rows() if isinstance(message, OutputBatch) else ():
                found.setdefault(output.rid, []).extend(output.token_ids)
                if output.finish is not None:
                    self.reasons[output.rid] = output.finish.reason
        self.sent.clear()
        return found


def text_of(token_ids: list[int]) -> str:
    """As a client sees it: without special tokens."""
    shown = [token for token in token_ids if token not in tokenizer().special_ids]
    return b"".join([tokenizer().token_bytes(token) for token in shown]).decode()
