"""bench_load: figures of a real load, printed and appended, and what it refuses."""

from __future__ import annotations

import json

import pytest

from baton.common.bench import load
from baton.tests.helpers.small_models import save_model


def test_loads_are_measured(tmp_path, capsys):
    model = save_model(tmp_path / "model", "Llama", shard="40KB")
    out = tmp_path / "figures.jsonl"
    with pytest.raises(SystemExit) as done:
        load.main(["--model-path", str(tmp_path / "model"), "--device", "cpu", "--tp", "2", "--rank", "1", "--repeat",
                   "2", "--drop-cache", "--output-file", str(out)])
    assert done.value.code == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert first["checkpoint_bytes"] == whole and 0.5 * whole < first["rank_bytes"] < 0.56 * whole
    assert first["load_s"] > 0 and second["read_s"] > 0 and second["copy_s"] > 0
    assert first["gb_per_s"] == pytest.approx(first["rank_bytes"] / first["load_s"] / 1e9)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("on cpu, --load-format auto, rank 1 of 2") and len(shown) == 4
    assert shown[1].split()[0] == "load" and [line.split()[0] for line in shown[2:]] == ["1", "2"]


@pytest.mark.parametrize("flags,error", [(["--rank", "1"], "--rank 1 must be between 0 and --tp-size - 1"),
                                         (["--repeat", "0"], "--repeat must be 1 or more"),
                                         (["--tp", "3"], "--tp-size 3 must divide"),
                                         (["--model-path", "/nowhere"], "there is no checkpoint folder")])
def test_what_is_refused(capsys, flags, error):
    with pytest.raises(SystemExit) as done:
        load.main(["--model-path", "tinychat", "--device", "cpu", *flags])
    assert done.value.code == 2 and error in capsys.readouterr().err
