"""Page tables of attention within chunks."""

from __future__ import annotations

import numpy as np
import torch

from baton.common.attention.chunked_backend import ChunkedBackend
from baton.common.attention.workspace import AttentionWorkspace
from baton.common.forward.forward_batch import Row, build_forward_batch

CPU = torch.device("cpu")
PAGE, CHUNK = 4, 16


class Recorder:
    """A backend whose plans are its batches."""

    attends_last_tokens = True

    def plan(self, batch, workspace, **options):
        self.options = options
        return self

    def run(self, layer, *inputs):
        return self.options


def backend(on_device=True):
    return ChunkedBackend(Recorder(), CHUNK, PAGE, on_device=on_device)


def decode(starts):
    rng = np.random.default_rng(0)
    rows = [Row([1], start, rng.permutation(100)[:start // PAGE + 1]) for start in starts]
    return build_forward_batch(rows, PAGE, CPU)


def tables(batch):
    bounds = batch.kv_indptr.tolist()
    return [batch.kv_indices[begin:end].tolist() for begin, end in zip(bounds, bounds[1:])]


def test_decode_steps_are_cut_alike_on_host_and_device():
    starts = (0, 3, 4, 15, 16, 17, 40, 47, 48, 63)
    batch = decode(starts)
    host, device = backend().cut(batch), backend().trimmed(batch)
    assert tables(host) == tables(device)
    assert [len(table) for table in tables(host)] == [start % CHUNK // PAGE + 1 for start in starts]
    assert host.kv_last_page_len.tolist() == batch.kv_last_page_len.tolist()


def test_a_replayed_step_reads_the_page_tables_of_its_replay():
    batch = decode((20, 40))
    plan = backend().plan(batch, AttentionWorkspace(CPU), max_length=4096)
    batch.kv_last_page_len.copy_(torch.tensor([2, 2]))
    assert plan.run(0) == {"max_length": CHUNK, "out": None}


def test_rows_of_a_prompt_are_cut_where_chunks_begin():
    pages = np.arange(20)
    batch = build_forward_batch([Row(list(range(40)), 10, pages), Row([1, 2], 14, pages + 20)], PAGE, CPU)
    cut = backend().cut(batch)
    assert np.diff(cut.qo_indptr_cpu).tolist() == [6, 16, 16, 2, 2]
    assert tables(cut) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12], [20, 21, 22, 23]]
    assert cut.kv_last_page_len.tolist() == [4, 4, 4, 2, 4]
    assert cut.positions is batch.positions and cut.last_tokens is not None
    assert tables(cut.last_tokens) == [[12], [20, 21, 22, 23]]
