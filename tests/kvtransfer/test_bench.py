"""``bench_kvtransfer`` on a tiny model: real processes, figures for every case, and wrong pages are noticed."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.bench import run
from baton.kvtransfer.bench.worker import Worker, WorkerRank

TINY = ["--num-layers", "4", "--num-kv-heads", "2", "--head-dim", "8", "--page-size", "4", "--repeat", "2"]


def test_every_case_has_a_figure(tmp_path, capsys):
    output, plot = tmp_path / "figures.json", tmp_path / "figures.svg"
    with pytest.raises(SystemExit) as exit:
        run.main([*TINY, "--backend", "ipc", "--tp", "2:1", "--prompt-tokens", "7", "64", "--output", str(output),
                  "--plot", str(plot)])
    assert exit.value.code == 0
    record = json.loads(output.read_text())
    assert record["settings"]["backend"] == "ipc" and min(record["copy_ceiling_gb_s"].values()) > 0
    cases = [(f["prompt_tokens"], f["order"]) for f in record["figures"]]
    assert cases == [(7, "scattered"), (7, "contiguous"), (64, "scattered"), (64, "contiguous")]
    for figure in record["figures"]:
        assert figure["tp"] == "2->1", "each rank sends its heads"
        assert figure["right"] and 0 < figure["gb_s"] <= figure["best_gb_s"]
        assert 0 < figure["p50_ms"] <= figure["p99_ms"]
    assert capsys.readouterr().out.count("right") == 4
    drawn = ElementTree.parse(plot).getroot()
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "2->1, pages of 4 tokens, scattered" in words and "2->1, pages of 4 tokens, contiguous" in words
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 2 * (1 + len(record["copy_ceiling_gb_s"]))


def test_descriptor_sizes_become_layer_groups():
    args = run.BenchArgs(descriptor_kib=(64, 1024, 1100, 1 << 20))
    assert [(len(layout.groups), layout.group_page_bytes(0) >> 10) for layout in args.layouts()] == [
        (32, 64), (2, 1024), (1, 2048)]


def test_a_page_that_differs_has_another_checksum():
    worker = Worker(WorkerRank("receiver", 0, 1, 1), run.BenchArgs(device="cpu"))
    worker._layout = KVLayout((1,), 2, 8, 2, "bfloat16")
    worker._pool, worker._page_ids = [torch.arange(512, dtype=torch.uint8).view(4, 128) % 7], np.array([2, 0])
    before = worker.digest()[0]
    worker._pool[0][1] += 1  # of no page of the prompt
    assert np.array_equal(worker.digest()[0], before)
    worker._pool[0][0, 32:64] = worker._pool[0][0, 32:64].roll(8)  # keys of the second head
    assert (worker.digest()[0] == before).tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("argv, words", [
    (["--repeat", "0"], "must be 1 or more"), (["--tp", "3:1"], "both dividing"), (["--tp", "2"], "as in 2:1"),
    (["--backend", "pigeon"], "invalid choice"), (["--plot", "/no/such/folder/figures.svg"], "Cannot write --plot")])
def test_settings_that_make_no_sense_are_sentences(argv, words, capsys):
    with pytest.raises(SystemExit) as exit:
        run.main(argv)
    assert exit.value.code == 2 and words in capsys.readouterr().err
