"""A device drafter for tests: it knows the answers, errs now and then, and checks what it is shown."""

from __future__ import annotations

import itertools

from baton.common.api.drafts import Drafts


class TableDrafter:
    """Drafts from ``answers``, the output tokens by request id, some of them wrong. It keeps the tokens that it was
    shown by KV slot, as a draft model's pool would, and asserts that all of a request's slots are right when it
    drafts. ``shifted``: a slot has the token after its own, too."""

    def __init__(self, answers, vocab, page_size, *, shifted=False, error_every=3):
        self.answers, self.vocab, self.page_size, self.shifted = answers, vocab, page_size, shifted
        self.error_every = error_every
        self.calls = itertools.count()
        self.slots = {}
        self.num_steps = self.num_drafted = 0
        self.kinds = set()  # (prompts, decode rows, drafts) that steps had

    def run(self, step):
        self.num_steps += 1
        self.store(step)
        return [self.draft(step, *each) for each in zip(step.step.sample_index, step.counts, step.limits)]

    def store(self, step):
        given, batch = step.step, step.batch
        self.kinds.add((given.num_prefill > 0, given.num_decode_rows > 0, bool(given.drafts)))
        rows = zip(batch.page_of_token.tolist(), batch.offset_in_page.tolist(), batch.input_ids.tolist(),
                   step.next_ids.tolist())
        for page, offset, token, following in rows:
            self.slots[page, offset] = (token, following)

    def draft(self, step, index, count, limit):
        given, req = step.step, step.step.reqs[index]
        assert 1 <= count <= given.num_samples[index]
        end = int(given.starts[index] + given.q_lens[index] - given.num_samples[index]) + count
        if not req.draft_gap:
            self.check(step, req, index, end, count)
        assert req.page_table.count * self.page_size >= given.starts[index] + given.q_lens[index] + limit
        number = next(self.calls)
        known = end + 1 - req.num_prompt_tokens
        size = min(limit, number % (limit + 2))
        drafts = (self.answers[req.rid][known:] + [1] * size)[:size]
        if drafts and number // 7 % self.error_every == 0:
            wrong = number // 3 % len(drafts)
            drafts[wrong] = (drafts[wrong] + 1) % self.vocab
        self.num_drafted += len(drafts)
        return Drafts(tuple(drafts)) if drafts else None

    def check(self, step, req, index, end, count):
        """The slots of all ``end`` tokens before the newest have these, and those after them."""
        begin, stop = step.batch.kv_indptr_cpu[index:index + 2].tolist()
        pages = step.batch.kv_indices_cpu[begin:stop].tolist()
        first = int(step.batch.qo_indptr_cpu[index + 1]) - int(step.step.num_samples[index])
        new = step.next_ids[first:first + count].tolist()
        tokens = [*req.tokens.view(0, end + 1 - count).tolist(), *new]
        assert len(tokens) == end + 1
        found = [self.slots.get((pages[at // self.page_size], at % self.page_size)) for at in range(end)]
        if not self.shifted:
            assert [slot and slot[0] for slot in found] == tokens[:-1]
        else:
            assert found == list(zip(tokens, tokens[1:]))
