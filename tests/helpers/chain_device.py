"""A device of numpy arrays that runs steps as late as it may, chain steps literally, over a model that is a hash.

A slot of the model's pool holds its token, so that a wrong page changes the answer; a slot of the draft's holds its
token and the next one.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from baton.common.api.drafts import Drafts
from baton.common.execution.executor import LaunchedStep
from baton.common.request.step_output import StepOutput

VOCAB = 13
UNUSED = -1


def next_token(tokens):
    """The model: what follows ``tokens``; often what is easy to guess."""
    tokens = np.asarray(tokens)
    weighted = int(((tokens[-5:] + 1) * np.arange(3, 3 + len(tokens[-5:]))).sum()) + int(tokens.sum()) // 7
    return weighted * 31 % 101 % VOCAB


def answer(prompt, max_new_tokens, stop_ids=()):
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt):]


class ChainDevice:
    """An Executor. ``wait`` of a step runs those launched up to it, and none after it but for ``eager`` ones."""

    asynchronous = True

    def __init__(self, num_pages, page_size, max_size, max_drafts, rng, eager=0.3, shifted=True):
        """``shifted``: what the draft stores of a token depends on the next one."""
        self.page_size, self.scratch, self.shifted = page_size, num_pages, shifted
        self.slots = np.full((num_pages + 1, page_size), UNUSED)
        self.draft_slots = np.full((num_pages + 1, page_size, 2), UNUSED)
        self.state = SimpleNamespace(positions=np.zeros(max_size, np.int64), num_drafts=np.zeros(max_size, np.int64),
                                     tokens=np.zeros((max_size, 1 + max_drafts), np.int64), step=0)
        self.rng, self.eager = rng, eager
        self.queue = []
        self.ran_early = False
        self.launched = []
        self.num_checked = self.num_void = 0
        self.samples = {}  # of plain steps, by number

    def run_idle_batch(self):
        pass

    def event(self):
        pass

    def launch(self, step, after_group=None):
        self.launched.append(step)
        if step.chains is not None:
            launched = ChainLaunched(self, step)
            self.queue.append(launched.run)
        else:
            launched = self._launch_other(step)
        self.ran_early = bool(self.rng.random() < self.eager)
        while self.ran_early and self.queue:
            self.queue.pop(0)()
        self.ran_early = False
        return launched

    def run_until(self, work):
        while work in self.queue:
            self.queue.pop(0)()

    # -- other steps -----------------------------------------------------------------------------------------------

    def _launch_other(self, step):
        def run():
            self.samples[step.number] = self._compute(step)

        def token_ids():
            self.run_until(run)
            return self.samples[step.number]

        self.queue.append(run)
        draft = None
        if not all(req.draft_gap for req in step.reqs):
            def draft(found):
                return self._draft_other(step, found)
        return LaunchedStep(step, SimpleNamespace(token_ids=token_ids, failures={}, checks_finite=False), [], draft)

    def _tokens(self, step):
        known, rows, sources, follows = step.tokens
        if known is None:
            return np.array(self.samples[follows])
        if len(rows):
            known = known.copy()
            known[rows] = np.array(self.samples[follows])[sources]
        return known

    def _compute(self, step):
        columns, tokens = step.columns, self._tokens(step)
        self.slots[columns.page_of_token, columns.offset_in_page] = tokens
        rows = step.sample_rows
        rows = columns.qo_indptr[1:] - 1 if rows is None else rows
        owners = np.searchsorted(columns.qo_indptr, rows, side="right") - 1
        for index, req in enumerate(step.reqs):
            self._check_owned(req, self._pages_of(columns, index))
        return [next_token(self._read(self._pages_of(columns, owner), int(columns.positions[row]) + 1))
                for row, owner in zip(rows.tolist(), owners.tolist())]

    def _pages_of(self, columns, index):
        return columns.kv_indices[columns.kv_indptr[index]:columns.kv_indptr[index + 1]]

    def _draft_other(self, step, found):
        """The drafter of steps that are no chain steps, which the host runs once it knows what was accepted."""
        columns, tokens = step.columns, self._tokens(step)
        counts = dict(zip(step.sample_index, found.counts))
        limits = dict(zip(step.sample_index, step.draft_limits or [0] * len(step.sample_index)))
        ends, drafts, at = columns.qo_indptr[1:].tolist(), {}, 0
        for index, req in enumerate(step.reqs):
            begin, end, pages = int(columns.qo_indptr[index]), ends[index], self._pages_of(columns, index)
            known = tokens[begin:end].tolist()
            if index in counts:
                count = counts[index]
                new, at = found.tokens[at:at + count], at + count
                right = end - begin - int(step.num_samples[index]) + count
                ids = known[:end - begin - int(step.num_samples[index]) + 1] + new
                assert len(ids) == right + 1
            else:
                following = int(columns.positions[end - 1]) + 1
                ids = [*known, *req.tokens.view(following, following + 1).tolist()]
            start = int(step.starts[index])
            self._extend(pages, start, ids)
            if index in counts and not req.draft_gap:
                newest = start + len(ids) - 1
                self._check_drafts(pages, newest, ids[-1])
                table = req.page_table.ids
                drafted = self._drafts(np.append(self._read(pages, newest), ids[-1]), limits[index])
                assert len(table) * self.page_size >= newest + limits[index] or not limits[index]
                self._spoil(table, newest, limits[index])
                if drafted:
                    drafts[index] = Drafts(tuple(drafted))
        return drafts

    # -- pools -----------------------------------------------------------------------------------------------------

    def _check_owned(self, req, pages):
        """The pages that a step reads and writes still belong to the request."""
        assert req.page_table is not None, f"{req} has no pages, and a step that writes into them"
        listed = pages[pages != self.scratch].tolist()
        assert listed == req.page_table.ids[:len(listed)].tolist() and (pages[len(listed):] == self.scratch).all()

    def _slot(self, pages, position):
        page = position // self.page_size
        assert page < len(pages), "an index leaves the page table"
        return pages[page], position % self.page_size

    def _read(self, pages, count):
        positions = np.arange(count)
        return self.slots[pages[positions // self.page_size], positions % self.page_size]

    def _extend(self, pages, start, ids):
        """Stores what the drafter computes of the tokens ``ids``, all but the last of which are at ``start`` and after.
        """
        for position, pair in enumerate(zip(ids, ids[1:]), start):
            self.draft_slots[self._slot(pages, position)] = pair

    def _spoil(self, pages, newest, count):
        """Stores drafts, where they may be overwritten."""
        for position in range(newest, newest + count):
            self.draft_slots[self._slot(pages, position)] = (-7, -7)

    def _check_drafts(self, pages, newest, newest_token):
        tokens = [*self._read(pages, newest).tolist(), newest_token]
        positions = np.arange(newest)
        found = self.draft_slots[pages[positions // self.page_size], positions % self.page_size]
        width = 1 + self.shifted
        assert found[:, :width].tolist() == [list(pair[:width]) for pair in zip(tokens, tokens[1:])], \
            "the draft reads what is not there"
        self.num_checked += newest

    def _drafts(self, tokens, count):
        """The right ones, but for some errors."""
        tokens, found = list(tokens), []
        for _ in range(count):
            right = next_token(tokens)
            found.append((right + (sum(tokens) % 5 == 0)) % VOCAB)
            tokens.append(found[-1])
        return found


class ChainLaunched:
    """A chain step that was launched."""

    def __init__(self, device, step):
        self.device, self.step = device, step
        self.result = None

    def wait(self):
        self.device.run_until(self.run)
        counts, tokens, drafts = [], [], []
        for samples, own in self.result:
            counts.append(len(samples))
            tokens += samples
            drafts.append(own)
        return StepOutput(self.step.sample_index, counts, tokens, chain_drafts=drafts)

    def run(self):
        chains, state = self.step.chains, self.device.state
        before = SimpleNamespace(positions=state.positions.copy(), num_drafts=state.num_drafts.copy(),
                                 tokens=state.tokens.copy())
        assert not (chains.sources >= 0).any() or chains.follows == state.step, "it follows another step"
        state.step, self.result = self.step.number, []
        for row, (source, req) in enumerate(zip(chains.sources.tolist(), self.step.reqs)):
            if source >= 0:
                newest, ids = int(before.positions[source]), before.tokens[source]
                num_drafts = int(before.num_drafts[source])
                assert chains.positions[row] <= newest
                assert chains.num_drafts[row] == min(num_drafts, chains.width - 1)
            else:
                newest, ids, num_drafts = int(chains.positions[row]), chains.tokens[row], int(chains.num_drafts[row])
                assert req.draft_gap or newest == 0 or ids[0] >= 0
            self._run_request(row, req, newest, ids.tolist(), num_drafts)

    def _run_request(self, row, req, newest, ids, num_drafts):
        device, chains, state, width = self.device, self.step.chains, self.device.state, self.step.chains.width
        pages = chains.kv_indices[chains.kv_indptr[row]:chains.kv_indptr[row + 1]]
        device._check_owned(req, pages)
        limit = int(chains.limits[row])
        valid = max(0, min(num_drafts + 1, width, limit - newest))
        device.num_void += width - valid
        known = req.num_pending <= 1 and not device.ran_early
        assert valid or req.finish is not None or not known, f"{req} has no page for its newest token"
        ids = (ids[:valid] + [0] * width)[:width]
        for place, token in enumerate(ids):  # void rows too
            device.slots[device._slot(pages, newest + place)] = token
        count, samples = 0, []
        for place in range(valid):
            if place and ids[place] != samples[-1]:
                break
            samples.append(next_token(device._read(pages, newest + place + 1)))
            count += 1
        device._extend(pages, newest, [*ids[:1], *samples])
        newest += count
        token = samples[-1] if samples else ids[0]
        drafts = [0] * (width - 1)
        if count and not req.draft_gap:
            device._check_drafts(pages, newest, token)
            drafts = device._drafts([*device._read(pages, newest), token], width - 1)
        device._spoil(pages, newest, width - 1)
        state.positions[row], state.num_drafts[row] = newest, width - 1
        state.tokens[row, :width] = [token, *drafts]
        self.result.append((samples, drafts))
