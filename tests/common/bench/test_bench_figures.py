"""Percentiles, goodput, counts: a run's figures out of answers with known times."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.common.bench.client.answer import Answer, Drafted, Failure
from baton.common.bench.report.figures import figures
from baton.common.bench.report.goodput import Slo
from baton.common.bench.report.plot import draw, open_requests, tokens_a_second
from baton.common.bench.report.progress import Progress
from baton.common.bench.report.report import append_line, details
from baton.common.bench.report.spread import Spread
from baton.common.bench.report.table import table
from baton.common.bench.serving import notes
from baton.common.bench.workloads.workload import Prompt


def answered(sent=0.0, ttft=0.1, gaps=(0.02, 0.02), *, due=None, output_len=None, cached=None, num_output=None):
    answer = Answer(Prompt(10, text="x"), output_len or len(gaps) + 1, sent if due is None else due, sent)
    now = sent + ttft
    answer.record_event(now)
    for gap in gaps:
        now += gap
        answer.record_event(now)
    answer.num_cached, answer.num_output = cached, num_output
    return answer


def failed(kind):
    answer = Answer(Prompt(10, text="x"), 3, 0.0, 0.0)
    answer.failure = Failure(kind, f"{kind}, says the server")
    return answer


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_numpys(count):
    values = [random.Random(count).expovariate(1) for _ in range(count)]
    found = Spread.of(values)
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(np.percentile(values, [50, 90, 95, 99]))
    assert (found.mean, found.std, found.max) == pytest.approx((np.mean(values), np.std(values), max(values)))


def test_of_nothing_there_is_no_number():
    found = Spread.of([])
    assert found.count == 0 and math.isnan(found.p99)
    assert set(found.keyed("ttft_ms").values()) == {None}


def test_times_of_one_answer():
    answer = answered(sent=5.0, ttft=0.1, gaps=(0.02, 0.04))
    assert (answer.ttft, answer.tpot, answer.e2e) == pytest.approx((0.1, 0.03, 0.16))
    several = answered(gaps=(0.02, 0.04), num_output=7)  # tokens that came together
    assert several.tpot == pytest.approx(0.06 / 6) and several.num_output_tokens == 7
    assert answered(gaps=()).tpot is None


def test_figures_of_a_run():
    answers = [answered(cached=4), answered(sent=1.0, ttft=0.3), answered(ttft=0.5, gaps=(0.1,), output_len=3),
               failed("HTTP 429"), failed("HTTP 429"), failed("broken stream")]
    found = figures(answers, 2.0, interrupted=4, slo=Slo.parse(["ttft:400", "tpot:50"]))
    assert (found.completed, found.num_failed, found.interrupted) == (3, 3, 4)
    assert found.failed == {"HTTP 429": 2, "broken stream": 1}
    assert (found.input_tokens, found.output_tokens, found.cached, found.short) == (30, 8, 4, 1)
    assert found.ttft.mean == pytest.approx(300) and found.itl.count == 5 and found.tpot.max == pytest.approx(100)
    assert found.concurrency == pytest.approx((0.14 + 0.34 + 0.6) / 2) and found.good == 2
    keyed = found.keyed()
    assert keyed["request_throughput"] == 1.5 and keyed["output_throughput"] == 4 and keyed["request_goodput"] == 1
    assert keyed["median_ttft_ms"] == pytest.approx(300) and keyed["cache_hit_rate"] == pytest.approx(4 / 30)
    told = table(found, Slo.parse(["ttft:400"]), notes=["a note"])
    for words in ("3 of 10 answered", "2 x HTTP 429", "1 x broken stream", "4 requests have no answer", "a note",
                  "1 answers have fewer", "4 prompt tokens (13.3%)", "2 of 10 within ttft <= 400 ms"):
        assert words in told


def test_a_run_without_answers_has_figures_too(tmp_path):
    found = figures([failed("connection")], 1.0, slo=Slo.parse(["e2e:1"]))
    assert found.completed == 0 and found.good == 0 and "0 of 1 answered" in table(found, None)
    append_line(str(tmp_path / "out.jsonl"), found.keyed())
    assert json.loads((tmp_path / "out.jsonl").read_text())["p99_ttft_ms"] is None
    xml.etree.ElementTree.fromstring(draw("nothing", [], 0.0, 1.0))


def test_drafts_are_summed_and_marked_where_simulated():
    first, second, plain = answered(num_output=9), answered(num_output=6), answered()
    first.drafted = Drafted(4, 12, 4, [1, 2, 1])
    second.drafted = Drafted(2, 6, 3, [0, 1, 1, 0], simulated=True)
    found = figures([first, second, plain], 1.0)
    assert found.drafted.keyed() == {
        "accept_length": 15 / 6, "accept_rate": 7 / 18, "accept_by_position": [5 / 6, 2 / 6, 0.0],
        "accept_histogram": [1, 3, 2, 0], "verify_steps": 6, "acceptance_simulated": True}
    assert found.keyed()["accept_length"] == 2.5
    assert "drafts      SIMULATED: 2.50 tokens a step (38.9% of 18 drafts; by position 83%, 33%, 0%)" in table(found)
    second.drafted = None
    first.drafted = Drafted(4, 12, 4)
    assert "drafts      2.25 tokens a step (33.3% of 12 drafts)" in table(figures([first, second], 1.0))
    without = figures([plain], 1.0)
    assert "drafts" not in table(without) and "accept_length" not in without.keyed()


def test_lateness_is_told_of_runs_with_times():
    answers = [answered(sent=1.0 + i / 10, due=1.0) for i in range(3)]
    assert figures(answers, 2.0, timed=True).late.max == pytest.approx(200)
    assert figures(answers, 2.0).late.count == 0


def test_goodput_reads_milliseconds():
    slo = Slo.parse(["ttft:100", "tpot:20", "e2el:140"])
    assert slo.limits == {"ttft": 100, "tpot": 20, "e2e": 140} and Slo.parse([]) is None
    assert slo.kept_by(answered(ttft=0.09, gaps=(0.019,))) and not slo.kept_by(answered(ttft=0.11, gaps=(0.01,)))
    for gaps in ((0.021,), (0.019,) * 3):
        assert not slo.kept_by(answered(ttft=0.09, gaps=gaps))
    assert slo.kept_by(answered(ttft=0.0999, gaps=()))  # no second token
    assert not slo.kept_by(failed("timeout"))


@pytest.mark.parametrize("words", [["ttft"], ["ttft:fast"], ["speed:3"], ["tpot:0"], ["tpot:-1"], ["ttft:nan"]])
def test_goodput_that_makes_no_sense_is_a_sentence(words):
    with pytest.raises(ConfigError, match="ttft:200"):
        Slo.parse(words)


def test_charts_are_svg_and_add_up():
    answers = [answered(sent=i * 0.5, gaps=(0.02,) * 50) for i in range(20)]
    drawn = draw("a <title>", answers, 0.0, 11.0)
    root = xml.etree.ElementTree.fromstring(drawn)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 6 and "a &lt;title&gt;" in drawn
    line = tokens_a_second(answers, 0.0, 11.0)
    assert sum(y for _, y in line.points) * 11.0 / len(line.points) == pytest.approx(20 * 51)
    counts = [y for _, y in open_requests(answers, 0.0).points]
    assert max(counts) == 3 and counts[-1] == 0  # each takes 1.1 s


def test_lines_are_appended_with_details(tmp_path):
    path = tmp_path / "out.jsonl"
    for name in ("one", "two"):
        append_line(str(path), {"tag": name, **details([answered(), failed("HTTP 500")])})
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["tag"], second["tag"]) == ("one", "two") and first["output_lens"] == [3, 0]
    assert first["errors"] == ["", "HTTP 500: HTTP 500, says the server"] and first["ttfts"][1] is None
    with pytest.raises(ConfigError, match="Cannot write"):
        append_line(str(tmp_path / "no" / "folder"), {})


def test_a_client_that_is_too_busy_says_so():
    answers = [answered(), failed("HTTP 429"), failed("timeout"), failed("HTTP 429")]
    assert notes(answers, 0.5) == [
        "first HTTP 429: HTTP 429, says the server", "first timeout: timeout, says the server"]
    (warning,) = notes([answered()], 0.97)
    assert "97% of a core" in warning


class Screen:
    def __init__(self, live):
        self.live, self.text = live, ""

    def isatty(self):
        return self.live

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("live", [True, False])
def test_progress_shows_count_time_and_what_is_left(live):
    now, screen = [0.0], Screen(live)
    progress = Progress("requests", 4, stream=screen, clock=lambda: now[0])
    progress.advance("fast")  # too early for a line
    assert screen.text == ""
    now[0] = 60.0
    progress.advance("2 failed")
    assert "[############............] 2/4 01:00<01:00  2 failed" in screen.text
    assert screen.text.endswith("\n") != live
    progress.close()
    assert screen.text.endswith("\x1b[2K") == live


def test_disabled_progress_is_silent():
    now, screen = [0.0], Screen(True)
    progress = Progress("requests", 2, stream=screen, clock=lambda: now[0], disabled=True)
    now[0] = 100.0
    progress.advance()
    progress.close()
    assert screen.text == "" and progress.done == 1
