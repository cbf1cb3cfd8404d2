"""Simulations of runs that were measured on real servers, with cost tables that were fitted to other requests."""

import numpy as np
import pytest

from baton.simulate import command
from baton.simulate.validation.compare import Compared, compare, shipped, summary


@pytest.fixture(scope="module")
def compared():
    return [each for run in shipped() for each in compare(run)]


@pytest.mark.parametrize("kind", ["H200", "paced CPU"])
def test_errors_stay_small(compared, kind):
    """Over all runs of a kind: 3 % on average of means, 8 % of 99th percentiles. A change of the schedulers changes
    them rightly where it changes what servers do: then measure anew (tests/bench/simulator_validation.py)."""
    of_kind = [each for each in compared if each.run.startswith(kind)]
    amounts = {statistic: [abs(each.error) for each in of_kind if each.statistic == statistic]
               for statistic in ("mean", "p99")}
    assert len(amounts["mean"]) >= 12
    assert np.mean(amounts["mean"]) < 0.03 and max(amounts["mean"]) < 0.16
    assert np.mean(amounts["p99"]) < 0.08 and max(amounts["p99"]) < 0.16


def test_measured_runs_say_what_they_are():
    for run in shipped():
        assert run.source and run.table().sources and run.client_cpu < 0.5
        assert len(run.requests) == len(run.ttft_ms) == len(run.e2e_ms)


def test_errors_are_summed_up():
    lines = summary([Compared("a", "ttft", name, 100.0, value) for name, value in
                     (("mean", 103), ("p50", 100), ("p99", 90), ("mean", 99))])
    assert lines[0] == "error of the mean    2.0% on average, 3.0% at most, over 2 figures"


def test_the_report_prints_its_own_validation(capsys, tmp_path):
    page = tmp_path / "page.html"
    [first, *_] = sorted((command.Path(command.__file__).parent / "validation/measured").glob("paced-1U*"))
    command.main(["--validate", "--measured-runs", str(first), "--html", str(page)])
    shown = capsys.readouterr().out
    assert "error of the p99" in shown and "TTFT" in shown and "1U" in shown
    assert "simulator_validation" in page.read_text()


@pytest.mark.parametrize("argv, sentence", [
    (["--measured-runs", "x"], "needs --validate"), (["--validate", "--plot", "x"], "leave --output-file"),
    (["--validate", "--measured-runs", "/nowhere"], "is no measured run")])
def test_errors_are_one_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as raised:
        command.main(argv)
    assert raised.value.code == 2 and sentence in capsys.readouterr().err
