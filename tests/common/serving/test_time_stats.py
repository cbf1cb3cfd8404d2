"""The log line of a request's stages."""

from __future__ import annotations

import logging
import time

import pytest

from baton.common.api.messages import LatencySpan
from baton.common.serving.context.time_stats import TimeStats


def test_each_stage_has_its_time(caplog: pytest.LogCaptureFixture) -> None:
    arrived = time.monotonic() - 1.0
    stages = [LatencySpan("queue", arrived + 0.25), LatencySpan("prefill", arrived + 0.5),
              LatencySpan("decode", arrived + 1.0)]
    with caplog.at_level(logging.INFO, "baton.requests"):
        TimeStats().end("a", "stop", arrived=arrived, stages=stages, num_prompt_tokens=4, num_output_tokens=2)
        TimeStats().end("b", "overloaded", arrived=arrived, stages=[], num_prompt_tokens=4, num_output_tokens=0)
    first, second = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert (first["queue_ms"], first["prefill_ms"]) == (250.0, 250.0)
    assert (first["decode_ms"], first["total_ms"]) == (500.0, 1000.0)
    assert set(second) == {"rid", "outcome", "prompt_tokens", "output_tokens", "total_ms"}
