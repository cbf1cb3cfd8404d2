"""``bench_one_batch`` on a GPU: kernels are told apart by name, in CUDA graphs too, and the host's time beside them."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_parts_of_a_step_by_its_kernels(tmp_path):
    from baton.common.bench import one_batch

    output, traces = tmp_path / "out.jsonl", tmp_path / "traces"
    with pytest.raises(SystemExit) as exit:
        one_batch.main(["--model-path", "tinychat", "--device", "cuda", "--batch-size", "1", "5", "--input-len", "100",
                        "--output-len", "20", "--repeat", "1", "--cuda-graph-max-bs", "8", "--output-file", str(output),
                        "--profile", "--profile-output-dir", str(traces), "--disable-progress"])
    assert exit.value.code == 0
    for line in output.read_text().splitlines():
        record = json.loads(line)
        for parts in (record["prefill_parts_ms"], record["decode_parts_ms"]):
            assert min(parts[part] for part in ("attention", "GEMM", "norm", "sampling")) > 0
        step = record["decode_step_ms"]
        assert 0 < record["host_ms"] <= step["max"] and sum(record["decode_parts_ms"].values()) <= step["max"] * 1.5
    assert len(list(traces.iterdir())) == 4
