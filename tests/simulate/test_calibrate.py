"""Calibration: steps are read from the times of tokens, and a fit finds the costs that made them."""

import json
from pathlib import Path

import numpy as np
import pytest

from baton.bench import bench_calibrate
from baton.common.api.errors import ConfigError
from baton.common.bench.client.answer import Answer
from baton.common.bench.workloads.workload import Prompt
from baton.simulate.calibrate import measure
from baton.simulate.calibrate.fit import fit
from baton.simulate.calibrate.measure import DECODE_STEPS, step_of, steps_of
from baton.simulate.calibrate.samples import DecodeSample, PrefillSample, PromptSample, Samples
from baton.simulate.costs.model import load
from baton.tests.helpers.harness import Server
from baton.tests.helpers.ports import free_port

PACED = Path(__file__).parents[1] / "helpers" / "paced_costs.json"


def answer(first, gaps=(), tokens=512):
    return Answer(Prompt(tokens, ids=[1] * tokens), len(gaps) + 1, 0.0, 0.0, first, None, list(gaps))


def test_first_tokens_that_come_together_are_a_step():
    """Steps of 1, 4, 4, 3, 4 and 2 prompts, 100 ms each, whose answers are sent 1 ms apart."""
    times = [0.1 * step + 0.001 * i for step, count in enumerate((1, 4, 4, 3, 4, 2)) for i in range(count)]
    found = steps_of([answer(time) for time in times], 512)
    assert [step.tokens for step in found] == [2048, 1536, 2048]
    assert [step.ms for step in found] == pytest.approx([100, 100, 100])
    assert found[0].pairs == 4 * 512 * 512 / 2


def test_a_decode_step_is_read_while_all_requests_decode():
    """Three streams that begin one step after the other; each event of a step is 0.1 ms after the one before."""
    count = 2 * DECODE_STEPS
    streams = [answer(0.02 * begin + 1e-4 * begin, [0.02] * (count - 1)) for begin in range(3)]
    sample = step_of(streams, 64)
    assert sample.rows == 3 and sample.ms == pytest.approx(20) and sample.spread == pytest.approx(0.2)
    assert sample.context == pytest.approx(3 * (64 + count / 2), abs=9)
    assert step_of([answer(0.0, [0.02] * 5), answer(9.0, [0.02] * 5)], 64) is None


def test_a_fit_finds_the_costs():
    steps = load("llama-3-8b-h200").steps
    rng = np.random.default_rng(1)
    noise = lambda: 1 + rng.normal(0, 0.004)  # noqa: E731
    samples = Samples(
        prompts=[PromptSample(n, (steps.prompt(n) + 1.5) * noise()) for n in (32, 256, 1024, 4096, 8192, 16384)
                 for _ in range(4)],
        prefill=[PrefillSample(n * c, c * n * n / 2, steps.prefill(n * c, c * n * n / 2) * noise())
                 for n, c in ((256, 1), (512, 1), (512, 16), (2048, 4), (8192, 1)) for _ in range(4)],
        decode=[DecodeSample(b, b * n, steps.decode(b, b * n) * noise(), 0.01 * b)
                for b in (1, 8, 64, 256) for n in (100, 1100, 4100)])
    fitted = fit(samples, name="fitted")
    found = fitted.costs.steps
    for n in (100, 1000, 10_000):
        assert found.prompt(n) == pytest.approx(steps.prompt(n), rel=0.02)
    for b, n in ((1, 500), (30, 2000), (256, 3000)):
        assert found.decode(b, b * n) == pytest.approx(steps.decode(b, b * n), rel=0.02)
    requests = fitted.costs.requests
    assert requests.request + requests.answer + requests.api_token == pytest.approx(1.5, abs=0.3)
    assert requests.api_token == pytest.approx(0.01)
    assert max(map(abs, fitted.errors["decode steps"])) < 0.02


def test_too_few_samples_are_refused():
    with pytest.raises(ConfigError, match="prompts of several lengths"):
        fit(Samples(), name="none")


@pytest.mark.parametrize("argv, sentence", [
    (["--output-file", "/nowhere/x"], "Cannot write --output-file"),
    (["--output-file", "x", "--pair-url", "http://127.0.0.1:1"], "go together")])
def test_errors_are_one_sentence(argv, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        bench_calibrate(argv)
    assert raised.value.code == 2 and sentence in capsys.readouterr().err


def test_a_real_server_with_known_steps_is_found_out(tmp_path, monkeypatch):
    """A paced server: its processes are real, its steps take what paced_costs.json says."""
    monkeypatch.setattr(measure, "DECODE_STEPS", 12)
    flags = ["--model-path", "tinychat", "--device", "cpu", "--max-total-tokens", "4096", "--log-level", "warning"]
    server = Server("baton.tests.helpers.paced_server", flags, free_port(), tmp_path / "server.log",
                    PACE_COSTS=str(PACED), OMP_NUM_THREADS="1").start()
    out = tmp_path / "table.json"
    try:
        server.wait_ready()
        bench_calibrate(["--base-url", server.url, "--output-file", str(out), "--max-batch", "3", "--max-context",
                         "256", "--repeats", "7"])
    finally:
        server.stop()
    table, true = load(str(out)), load(str(PACED)).steps
    assert table.kv_tokens == 4096 and table.name == "table" and json.loads(out.read_bytes())["sources"]["all"]
    for rows in (1, 3):
        assert table.steps.decode(rows, rows * 100) == pytest.approx(true.decode(rows, rows * 100), rel=0.15)
    prompt = table.steps.prompt(256) + table.requests.request  # a busy machine only makes it longer
    assert 0.8 * true.prompt(256) < prompt < 3 * true.prompt(256)
