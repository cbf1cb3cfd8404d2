"""A prefill and a decode scheduler of a gpt-oss model answer as a unified one does."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.reshard import RankLayout as Ranks
from baton.kvtransfer.protocol.reshard import find_mismatch
from baton.tests.helpers.gpt_oss_models import WINDOW, save_gpt_oss
from baton.tests.integration.transfer.test_deepseek_relay import check_servers, pair_equal_to_unified
from baton.tests.integration.transfer.test_relay_in_process import VOCAB, bootstrap_port

__all__ = ["bootstrap_port"]


def test_disaggregated_tokens_equal_unified(tmp_path, bootstrap_port):  # noqa: F811 (the fixture)
    """Prompts and answers beyond the window, in chunks that end within it; the second time over both prefix caches."""
    save_gpt_oss(tmp_path, vocab_size=VOCAB, eos_token_id=None)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in (3, WINDOW - 1, WINDOW, 40, 70)]
    with pair_equal_to_unified(tmp_path, prompts, bootstrap_port, "fake") as (_, decode):
        assert [layout.windows for layout in decode.scheduler.receiver.info.layouts] == [(None,) * 2, (WINDOW,) * 2]


@pytest.mark.slow
def test_servers_of_unequal_ranks_answer_as_one(tmp_path):
    save_gpt_oss(tmp_path / "model", vocab_size=4096, eos_token_id=2)
    check_servers(tmp_path, tmp_path / "model", 2, 1)


def test_servers_with_other_windows_are_told_apart():
    """A prefill stage counts its layers from its own first."""
    layout = KVLayout((3,), 2, 16, 4, "float32", windows=(16, None, 16))
    stage = KVLayout((2,), 2, 16, 4, "float32", first_layer=1, of_layers=3, windows=(None, 16))
    assert find_mismatch(Ranks(1, layout), Ranks(1, layout)) is None and find_mismatch(Ranks(1, stage),
                                                                                       Ranks(1, layout)) is None
    other = msgspec.structs.replace(layout, windows=())
    assert find_mismatch(Ranks(1, stage), Ranks(1, other)) == "the sliding window of layer 2 is None here and 16 there"
