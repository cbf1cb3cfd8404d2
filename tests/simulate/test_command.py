"""``baton_simulate`` as a user runs it."""

import json

import pytest

from baton.common.api.errors import ConfigError
from baton.simulate import command
from baton.simulate.costs import model


def test_table_json_and_page(tmp_path, capsys):
    out, page, plot = tmp_path / "out.jsonl", tmp_path / "page.html", tmp_path / "plot.svg"
    command.main(["--rate", "8", "--num-requests", "40", "--prefill", "1", "--decode", "1", "--output-len", "30:0.4",
                  "--goodput", "ttft:500", "tpot:20", "--output-file", str(out), "--output-details", "--html",
                  str(page), "--plot", str(plot), "--policy", "least_loaded", "--chunked-prefill-size", "2048"])
    shown = capsys.readouterr().out
    assert "1P1D, 2 GPUs" in shown and "TTFT" in shown and "100.0% of the requests within" in shown
    record = json.loads(out.read_text())
    assert record["completed"] == 40 == len(record["ttfts"]) and record["mean_ttft_ms"] > 20
    assert [server["name"] for server in record["servers"]] == ["p0", "d0"]
    assert record["transfer_bytes"] == 40 * 1024 * 131072
    text = page.read_text()
    assert "<svg" in text and "http://" not in text.replace("http://www.w3.org", "") and "<script" not in text
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize("argv, sentence", [
    (["--costs", "gpt-9"], "There is no cost table 'gpt-9'"), (["--prefill", "1"], "--decode"),
    (["--trace", "/nowhere"], "Cannot read --trace"), (["--html", "/nowhere/x.html"], "Cannot write --html")])
def test_errors_are_one_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as raised:
        command.main(argv)
    assert raised.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", model.shipped())
def test_shipped_tables_say_where_figures_come_from(name):
    costs = model.load(name)
    assert costs.name == name and costs.sources
    assert costs.steps.decode(64, 64 * 1024) > costs.steps.decode(1, 1024) > 0


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no cost table"):
        model.load(str(path))
    table = model.load("llama-3-8b-h200").to_json()
    path.write_bytes(table.replace(b'"prefill_token": 0.02064', b'"prefill_token": -1'))
    with pytest.raises(ConfigError, match="negative cost"):
        model.load(str(path))
