"""The bar of starting: on terminals alone."""

from __future__ import annotations

import io

import pytest

from baton.common.obs.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_grows_and_is_cleared():
    stream, now = Terminal(), [0.0]
    bar = ProgressBar(stream=stream, clock=lambda: now[0])
    for at, fraction in ((0.0, 0.0), (2.0, 0.25), (2.01, 0.3), (8.0, 1.0)):
        now[0] = at
        bar.draw("loading weights", fraction)
    bar.clear()
    bar.clear()
    bars = stream.getvalue().split("\r\x1b[2K")
    assert bars == ["", "loading weights [........................] 0 %, 0 s",
                    "loading weights [######..................] 25 %, 2 s, 6 s left",
                    "loading weights [########################] 100 %, 8 s", ""]


@pytest.mark.parametrize("stream,enabled", [(io.StringIO(), True), (Terminal(), False)])
def test_nothing_is_drawn_elsewhere(stream, enabled):
    bar = ProgressBar(enabled=enabled, stream=stream)
    bar.draw("loading weights", 0.5)
    bar.clear()
    assert not stream.getvalue()
