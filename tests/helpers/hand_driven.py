"""An engine in this process, stepped by hand: a scheduler with all its parts."""

from __future__ import annotations

import numpy as np

from baton.common.api.grammar import GrammarSpec
from baton.common.api.messages import Generate, PrepareGrammar
from baton.common.api.sampling import SamplingParams
from baton.common.config.server import (
    CacheArgs,
    DataParallelArgs,
    DisaggregationArgs,
    HttpArgs,
    KernelArgs,
    ModelArgs,
    OffloadArgs,
    ParallelArgs,
    ScheduleArgs,
    ServerConfig,
    SparsityArgs,
    TierArgs,
)
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.distributed.parallel import Parallel
from baton.common.engine.unified_scheduler import UnifiedScheduler
from baton.common.execution.draft_pass import DraftPass
from baton.common.execution.executor import Executor
from baton.common.execution.pp_executor import PPExecutor
from baton.common.execution.simulated_samples import SimulatedSamples
from baton.common.grammar.store import GrammarStore
from baton.common.kvcache.manager import KVCacheManager
from baton.common.models.registry import load_model_spec
from baton.common.runner.model_runner import ModelRunner
from baton.common.sampling.sampler import Sampler
from baton.common.scheduler.drafting import Drafting
from baton.common.scheduler.make_batcher import make_batcher
from baton.common.scheduler.request_tracker import RequestTracker
from baton.common.speculative.simulated import SimulatedAcceptance

from .chain_steps import Again
from .outputs import outputs_of


class Engine:
    """A scheduler with all its parts, stepped by hand."""

    def __init__(self, folder, *, page_size=4, max_total_tokens=2048, chunk=8192, max_running=64, radix=True,
                 policy="fcfs", overlap=False, device="cpu", kernels=None, dtype="float32",
                 load_format="auto", schedule=None, parallel=None, vocabulary=None, quantization=None,
                 kv_cache_dtype="auto", line=None, parts=None, groups=None, cache=None, proposer=None, max_drafts=4,
                 drafter=None, features=None, speculative=None, simulated=None, model_impl="baton", chains=None,
                 offload=None, grammar_backend="xgrammar", tiers=None, sparsity=None):
        """``schedule``: further fields of ScheduleArgs; by default nothing is reserved for output, so that small pools
        see retractions. ``vocabulary``: of grammars. ``line``: between the pipeline stages of ``parts`` (ParallelArgs).
        ``groups``: DataParallelArgs. ``cache``: further fields of CacheArgs. ``drafter`` on the device, which reads
        ``features``; ``speculative`` (SpeculativeArgs) names one that the runner loads. ``simulated``: shares of
        accepted drafts, by position. ``chains``: sizes of the chain steps that are recorded, by drafts.
        ``tiers``: fields of TierArgs."""
        cache_args = CacheArgs(page_size=page_size, max_total_tokens=max_total_tokens, disable_radix_cache=not radix,
                               kv_cache_dtype=kv_cache_dtype, **(cache or {}))
        schedule = ScheduleArgs(**{"schedule_conservativeness": 0.0} | dict(schedule or {}), chunked_prefill_size=chunk,
                                max_running_requests=max_running, schedule_policy=policy)
        model = ModelArgs(model_path=str(folder), dtype=dtype, load_format=load_format, quantization=quantization,
                          model_impl=model_impl)
        config = ServerConfig(model, cache_args, schedule, parts or ParallelArgs(), kernels or KernelArgs(),
                              DisaggregationArgs(), HttpArgs(), data_parallel=groups or DataParallelArgs(),
                              speculative=speculative or SpeculativeArgs(), offload=offload or OffloadArgs(),
                              tiers=TierArgs(**tiers or {}), sparsity=sparsity or SparsityArgs())
        spec = load_model_spec(config.model)
        self.config, self.parallel = config, parallel or Parallel()
        runner = self.runner = ModelRunner.load(config, spec, self.parallel, device, lambda what, share: None)
        if chains:
            runner.chain_steps.record(chains, Again(), lambda what, share: None)
        self.cache = KVCacheManager(runner.num_pages, page_size, radix, runner.new_cache_groups(),
                                    int(drafter.shifted) if drafter else runner.lookahead)
        self.sent = []
        self.tracker = RequestTracker(self.sent.append, eos_ids=frozenset(spec.eos_token_ids),
                                      vocab_size=spec.vocab_size, max_request_tokens=max_total_tokens,
                                      max_requests=512, timeout=1e9)
        self.grammars = None
        if vocabulary is not None:
            self.grammars = GrammarStore(None, spec.vocab_size, self.tracker.eos_ids, grammar_backend)
            self.grammars.prepare(PrepareGrammar(0, GrammarSpec("regex", "x"), vocabulary))
        if drafter is None and runner.drafter is not None:
            drafter, features = runner.drafter, runner.draft_model.features
        executor = Executor(runner, Sampler(spec.vocab_size, device, 0, self.parallel.attn_tp), self.grammars,
                            drafter and DraftPass(drafter, features, self.parallel.attn_tp),
                            simulated and SimulatedSamples(SimulatedAcceptance(simulated, 0)))
        self.executor = executor if line is None else PPExecutor(executor, line, self.parallel)
        batcher = make_batcher(config, runner, self.cache, self.parallel.attn_tp, line)
        self.drafting = batcher.drafting
        if proposer or drafter:
            keeps = batcher.drafting is not None and batcher.drafting.keeps_drafts
            self.drafting = batcher.drafting = Drafting(proposer, self.cache, max_drafts,
                                                        max_request_tokens=spec.context_length,
                                                        room=max(max_drafts, config.speculative.room_for_drafts))
            self.drafting.keeps_drafts = keeps
            if batcher.chains is not None:
                batcher.chains._drafting = self.drafting
        self.scheduler = UnifiedScheduler(batcher, self.executor, self.tracker, overlap=overlap)

    def start(self, rid, prompt, **sampling):
        options = {"logprobs": {}} | sampling
        logprobs = options.pop("logprobs")
        fields = options.pop("fields", {})  # further ones of Generate
        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 12} | options)
        req = self.tracker.accept(Generate(rid, list(prompt), params, **logprobs, **fields),
                                  now=float(len(self.tracker.live)))
        if req is not None:
            if params.grammar is not None:
                req.matcher = self.grammars.matcher(req, req.num_prompt_tokens)
            self.scheduler.add(req)
        return req

    def run(self):
        while self.scheduler.step(0.0):
            self.tracker.flush()
        assert self.scheduler.idle and not self.tracker.live
        self.cache.check_integrity()
        assert self.cache.num_allocated == 0
        swap = self.scheduler.batcher.swap
        assert swap is None or swap.num_pages == 0
        outputs = outputs_of(self.sent)
        self.sent.clear()
        return outputs


def tokens_of(outputs):
    tokens = {}
    for item in outputs:
        tokens.setdefault(item.rid, []).extend(item.token_ids)
    return tokens


def finishes_of(outputs):
    return {item.rid: item.finish for item in outputs if item.finish is not None}


def sharing_prompts(count, vocab):
    """Random prompts of up to 62 tokens; every third begins as the others of these do."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, vocab, 40).tolist()
    return [shared[:int(rng.integers(0, 40)) * (i % 3 == 0)] + rng.integers(0, vocab, 1 + i % 23).tolist()
            for i in range(count)]


def start_all(engine, prompts, requests, max_new_tokens=30):
    """Starts a request of each prompt, with the sampling parameters of ``requests`` in turn."""
    return [engine.start(str(i), prompt, **{"max_new_tokens": max_new_tokens} | requests[i % len(requests)])
            for i, prompt in enumerate(prompts)]


def ask(engine, prompt):
    """The answer, and how many tokens of the prompt were not computed."""
    req = engine.start("0", prompt, ignore_eos=True)
    while not engine.scheduler.idle:
        engine.scheduler.step(0.0)
        engine.tracker.flush()
    return tokens_of(engine.run())["0"], req.num_cached_tokens


def evict(engine):
    """Evicts all pages of an idle engine with one further cache group from its prefix cache."""
    engine.scheduler.step(0.0)
    engine.cache._evict(engine.cache.num_cached)
    group, = engine.cache.groups
    assert engine.cache.num_cached == group.num_cached == 0
