"""Latents travel: a prefill and a decode scheduler of a DeepSeek model answer as a unified one does."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.engine.unified import UnifiedScheduler
from baton.decode.rank import _make_scheduler as make_decode
from baton.prefill.rank import _make_scheduler as make_prefill
from baton.tests.common.deepseek_models import save_deepseek
from baton.tests.integration.test_relay_in_process import VOCAB, Side, bootstrap_port, run, tokens_of

__all__ = ["bootstrap_port"]


def make_unified(parts):
    return UnifiedScheduler(parts.batcher, parts.executor, parts.ledger, overlap=False)


@pytest.mark.parametrize("backend", ["fake", "nixl"])
def test_disaggregated_tokens_equal_unified(tmp_path, bootstrap_port, backend):  # noqa: F811 (the fixture)
    """Of two layer groups, in chunks that end within pages; the second time over both prefix caches."""
    save_deepseek(tmp_path, 3, vocab_size=VOCAB)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 70, 8)]
    unified = Side(tmp_path, make_unified, "null", 0, backend)
    for i, prompt in enumerate(prompts):
        unified.start(str(i), prompt)
    run(unified)
    expected = tokens_of(unified.take()[0])
    assert len({tuple(tokens) for tokens in expected.values()}) == len(prompts), "the model answers all alike"

    prefill = Side(tmp_path, make_prefill, "prefill", bootstrap_port, backend, chunk=23)
    decode = Side(tmp_path, make_decode, "decode", bootstrap_port, backend)
    try:
        for attempt in range(2):
            for i, prompt in enumerate(prompts):
                for side in (prefill, decode):
                    side.start(str(i), prompt, room=1000 * attempt + i, port=bootstrap_port)
            run(prefill, decode)
            outputs, failures = decode.take()
            assert not failures and tokens_of(outputs) == expected
            assert not prefill.take()[1]
            prefill.assert_clean()
            decode.assert_clean()
        layout = decode.scheduler.receiver.info.layout
        sent = prefill.scheduler.sender.counters["kv_bytes_sent"]
        assert layout.form == "latent" and layout.groups == (2, 1)
        # Whole pages the first time; then only the last ones, which no prefix cache keeps for the first decoded token.
        pages = sum(-(-len(prompt) // 4) for prompt in prompts)
        assert pages * layout.page_bytes < sent < (pages + 2 * len(prompts)) * layout.page_bytes
    finally:
        prefill.scheduler.close()
        decode.scheduler.close()
