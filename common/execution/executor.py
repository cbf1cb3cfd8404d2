"""The executor runs steps: builds the model's input, launches the forward pass, and samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..api.drafts import Drafts
from ..api.errors import InvalidRequest
from ..forward.forward_batch import AfterGroup, ForwardBatch, ModelInput, TokenIds
from ..grammar.store import GrammarStore
from ..request.extras import Report, RowState, row_extras
from ..request.sampling_metadata import FAILED, NOT_FINITE, SamplingMetadata
from ..request.step_input import StepInput
from ..request.step_output import RowOutput, StepOutput, keep_accepted
from ..sampling.extras.embeds import embeds_of
from ..sampling.extras.hidden_states import HiddenReport, RequestRows, hidden_rows
from ..sampling.extras.prompt_logprobs import PromptReport, PromptRow, prompt_rows
from ..sampling.extras.routed_experts import RoutedReport, routed_rows
from ..sampling.loose_acceptance import drafts_after
from .accepted_rows import Accepted, accepted, paths_to_move
from .chain_launch import ChainLauncher
from .draft_pass import ComputedStep, DraftPass
from .extra_rows import ExtraRow, extra_rows, fill_masks
from .launched import Launched
from .non_finite import fail_non_finite
from .simulated_samples import SimulatedSamples

if TYPE_CHECKING:
    from ..runner.model_runner import ModelRunner
    from ..sampling.sampler import Sample, Sampler


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched. Its results stay on the device until ``wait``.

    ``draft``: where a drafter follows the step, it runs once the host knows which drafts were accepted; it returns its
    own drafts by the request's index in the step. ``move``, before that: where drafts are trees, it moves the keys and
    values of accepted ones.
    """

    step: StepInput
    sample: Sample
    reports: Sequence[Report]
    draft: Callable[[Accepted], dict[int, Drafts]] | None = None
    move: Callable[[Accepted], None] | None = None

    def wait(self) -> StepOutput:
        """Waits for the step; changes no request. To be called once, without ``draft`` and ``move`` possibly
        in another thread."""
        step = self.step
        found = accepted(step, self.sample.token_ids())
        extras: dict[int, RowOutput] = {}
        for report in self.reports:
            report.add_to(extras)
        if step.extra_index:
            if FAILED in found.tokens:
                self._add_failures(found, extras)
            if step.drafts:
                keep_accepted(step, found.counts, found.rows, extras)
        if self.sample.checks_finite and NOT_FINITE in found.tokens:
            fail_non_finite(step, found.counts, found.tokens, extras)
        if self.move is not None:
            self.move(found)
        num_drafts = (step.num_samples[step.sample_index] - 1).tolist() if step.drafts else []
        return StepOutput(step.sample_index, found.counts, found.tokens, extras,
                          {} if self.draft is None else self.draft(found), num_drafts=num_drafts)

    def _add_failures(self, found: Accepted, extras: dict[int, RowOutput]) -> None:
        """Fails requests whose first row has failed; where it is a draft's row, the next step computes it anew."""
        owners = self.step.sample_owners
        for row, token_id in zip(found.rows, found.tokens):
            if token_id == FAILED:
                error = InvalidRequest(self.sample.failures[row])
                output = extras.setdefault(owners[row], RowOutput())
                output.error_code, output.error = error.wire_code, error.message


class Executor:
    """One rank's model and sampler. Launched steps run in order; a step may compute on the tokens of the step
    before."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, grammars: GrammarStore | None = None,
                 draft_pass: DraftPass | None = None, simulated: SimulatedSamples | None = None):
        """``grammars``: those of requests with a matcher, on the rank that samples. ``draft_pass`` follows each step
        that samples or computes prompts, where a drafter drafts on the device. ``simulated``: which drafts are
        accepted is drawn."""
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._draft_pass = draft_pass
        self._simulated = simulated
        self._last: LaunchedStep | None = None
        self._chains = ChainLauncher(runner, sampler, self._sample_chains)

    @property
    def asynchronous(self) -> bool:
        """True if ``launch`` returns before the step has run, so that the host can work meanwhile."""
        return self._runner.device.type == "cuda"

    @property
    def drafts_from_tokens(self) -> bool:
        """True where a drafter on the device reads tokens alone."""
        return self._draft_pass is not None and self._draft_pass.features is None

    def launch(self, step: StepInput, after_group: AfterGroup | None = None) -> Launched:
        """Starts computing a step. Pending tokens are read from the step launched before, on the device: only a chain
        step may follow a chain step with any.

        ``after_group(g, event)`` is called once layer group g's keys and values have been enqueued; the pool has them
        after ``event`` (None on a CPU). The layer groups of the draft's pool are the last. Where a request has a
        grammar, its mask is filled while the device runs the forward pass; that needs its pending token, so that the
        host then waits for the step before.
        """
        if self._runner.before_step is not None:
            self._runner.before_step(step.num_prefill)
        if step.chains is not None:
            assert after_group is None
            self._last = None
            return self._chains.launch(step, step.chains)
        prompt, hidden = (prompt_rows(step), hidden_rows(step)) if step.extra_index else ([], [])
        logits, argmax, states, features, batch = self._runner.step(self._model_input(step, prompt, hidden),
                                                                    after_group)
        count = len(step.sampling)
        sample = self._sample(step, logits[:count] if prompt else logits, argmax)
        reports = sample.reports
        if prompt:
            reports = [*reports, PromptReport(prompt, logits[count:])]
        if states is not None:
            reports = [*reports, HiddenReport(hidden, states)]
        if self._runner.chosen_experts is not None and step.extra_index and (routed := routed_rows(step)):
            reports = [*reports, RoutedReport(routed, self._runner.chosen_experts)]
        draft = None
        if self._draft_pass is not None and batch is not None and _is_drafted(step):
            draft = self._draft(ComputedStep(step, batch, features, sample.tokens), after_group)
        move = None
        if step.columns.mask is not None:
            assert batch is not None
            move = partial(self._move_accepted, step, batch)
        self._last = LaunchedStep(step, sample, reports, draft, move)
        return self._last

    def _move_accepted(self, step: StepInput, batch: ForwardBatch, found: Accepted) -> None:
        """Moves the keys and values of the accepted drafts of trees to the slots of chains."""
        moved = paths_to_move(step, found, batch.input_ids.device)
        if moved is not None:
            self._runner.move_slots(batch, *moved)

    def _draft(self, computed: ComputedStep, after_group: AfterGroup | None) -> Callable[[Accepted],
                                                                                         dict[int, Drafts]]:
        """Runs the drafter after a step, with ``after_group`` now, as the draft's layer groups follow the model's; else
        once the returned function is called with the accepted rows."""
        assert self._draft_pass is not None
        if after_group is None:
            return partial(self._draft_pass.run, computed)
        samples = computed.step.sample_index
        drafts = self._draft_pass.run(computed, Accepted([1] * len(samples), range(len(samples)), []))
        assert not computed.step.drafts and self._runner.draft_pool is not None
        first = sum(len(pool.layout.groups) for pool in self._runner.pools)
        for group in range(len(self._runner.draft_pool.groups)):
            after_group(first + group, self.event())
        return lambda accepted: drafts

    def forward(self, step: StepInput, after_group: AfterGroup | None = None) -> None:
        """Does as ``launch`` on a pipeline stage before the last one, which has no logits. No token may be pending."""
        if self._runner.before_step is not None:
            self._runner.before_step(step.num_prefill)
        self._runner.step(ModelInput(step.columns, self._token_ids(step), np.empty(0, np.int64),
                                     embeds=embeds_of(step), num_prefill=step.num_prefill), after_group)

    def draft_prompt(self, step: StepInput) -> Drafts | None:
        """Computes a chunk of a prompt by the draft model alone; see DraftPass.run_prompt."""
        assert self._draft_pass is not None
        self._runner.wait_for_loads()
        return self._draft_pass.run_prompt(step, self._runner.device)

    def run_idle_batch(self) -> None:
        """Takes part in the computation of other data-parallel ranks, in an iteration without a batch."""
        self._runner.run_idle_batch()

    def event(self) -> torch.cuda.Event | None:
        """Records an event after all launched steps, and after the loads of pages for which the next one waits; returns
        None where launching computes."""
        if not self.asynchronous:
            return None
        event = torch.cuda.Event()
        if not (loads := self._runner.step_loads):
            event.record()
            return event
        launched = torch.cuda.current_stream()
        with torch.cuda.stream(self._beside):
            self._beside.wait_stream(launched)
            for load in loads:
                load.wait_on_device()
            event.record()
        return event

    @functools.cached_property
    def _beside(self) -> torch.cuda.Stream:
        """A stream that computes nothing."""
        return torch.cuda.Stream(self._runner.device)

    @property
    def _previous(self) -> torch.Tensor | None:
        """The tokens that the previous step sampled."""
        return None if self._last is None else self._last.sample.tokens

    def _model_input(self, step: StepInput, prompt: list[PromptRow], hidden: list[RequestRows]) -> ModelInput:
        token_ids, rows = self._token_ids(step), step.sample_rows
        follows_argmax = step.tokens.known is None and self._last is not None and self._last.sample.is_argmax
        drafts = self._draft_pass is not None and _is_drafted(step)
        features = self._draft_pass.features if self._draft_pass is not None and drafts else None
        if not step.extra_index:
            return ModelInput(step.columns, token_ids, rows, follows_argmax=follows_argmax,
                              drafts=drafts, features=features, num_prefill=step.num_prefill)
        if prompt or hidden:
            sampled = step.columns.qo_indptr[1:] - np.int64(1) if rows is None else rows
            rows = np.concatenate([sampled, [row.row for row in prompt],
                                   *(np.arange(part.start, part.stop) for part in hidden)]).astype(np.int64)
        return ModelInput(step.columns, token_ids, rows, sum(part.stop - part.start for part in hidden),
                          embeds_of(step), follows_argmax, drafts, features, step.num_prefill)

    def _token_ids(self, step: StepInput) -> TokenIds | torch.Tensor:
        known, rows, sources, follows = step.tokens
        previous = self._previous
        if known is not None and not len(rows):
            return TokenIds(known)
        assert self._last is not None and previous is not None and self._last.step.number == follows, \
            "a pending token comes from the step before"
        return previous if known is None else TokenIds(known, rows, sources, previous)

    def _sample_chains(self, step: StepInput, logits: torch.Tensor, argmax: torch.Tensor) -> LaunchedStep:
        sample = self._sample(step, logits, argmax)
        return LaunchedStep(step, sample, sample.reports)

    def _sample(self, step: StepInput, logits: torch.Tensor, argmax: torch.Tensor | None) -> Sample:
        sample = self._model_sample(step, logits, argmax if step.all_greedy else None)
        if self._simulated is not None and step.drafts:
            return self._simulated.replace(step, sample)
        return sample

    def _model_sample(self, step: StepInput, logits: torch.Tensor, argmax: torch.Tensor | None) -> Sample:
        sampling = step.sampling
        if step.drafts and self._sampler.accepts_loosely:
            sampling = drafts_after(sampling, step.num_samples.tolist(), step.drafts)
        if not step.extra_index:
            return self._sampler.launch(logits, sampling, extra_rows=(), argmax=argmax)
        metadata = list(sampling)
        rows, owners = extra_rows(step), step.sample_owners
        pending = self._pending(rows)
        masks = fill_masks(rows, pending, self._previous_ids, self._grammars)
        for row, (req, position, path) in rows.items():
            state = RowState(position, pending.get(row), masks.get(row), path)
            metadata[row] = SamplingMetadata(metadata[row].params, position, row_extras(req, state),
                                             metadata[row].drafts)
        return self._sampler.launch(logits, metadata, self._previous, extra_rows=list(rows), argmax=argmax,
                                    index=owners)

    def _previous_ids(self) -> list[int]:
        """Waits for the tokens that the previous step sampled."""
        assert self._last is not None
        return self._last.sample.token_ids()

    def _pending(self, rows: Mapping[int, ExtraRow]) -> dict[int, int]:
        """Returns the index in ``_previous`` of the pending tokens of requests that have one, by their ``rows``."""
        pending = {row: req for row, (req, _, _) in rows.items() if req.num_pending}
        if not pending:
            return {}
        assert self._last is not None, "a pending token comes from the step before"
        source_of = self._last.step.sample_of
        return {row: source_of[req] for row, req in pending.items()}


def _is_drafted(step: StepInput) -> bool:
    """True where the drafter follows the step: some of its requests have all their tokens in the draft's KV pool."""
    return not all(req.draft_gap for req in step.reqs)
