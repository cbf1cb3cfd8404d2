"""Plans: the cheapest cluster that meets the objective, its commands and values."""

import json
import shlex

import jsonschema
import pytest
import yaml

from baton.common.config.cli import read_values
from baton.common.config.server import ScheduleArgs, ServerConfig
from baton.common.config.server.sglang_flags import SGLANG_FLAGS
from baton.router.config import RouterConfig
from baton.router.config.policy import PolicyArgs
from baton.simulate.args import WorkloadArgs
from baton.simulate.plan import command, commands
from baton.simulate.plan.args import Objective, Plan, PlanArgs
from baton.simulate.plan.candidates import candidates
from baton.simulate.plan.search import Found, search
from baton.simulate.predict import Traffic
from baton.simulate.results.figures import figures
from baton.simulate.workload.synthetic import Lengths, synthetic
from baton.simulate.world.cluster import simulate
from baton.tests.helpers.layers import ROOT

REQUESTS = synthetic(16, 150, Lengths(2048, 0.5), Lengths(120, 0.5), seed=1)


def plan(**flags):
    args = PlanArgs(**{"goodput": ("ttft:500", "tpot:12"), "max_gpus": 3, **flags})
    return Plan(args, WorkloadArgs(), ScheduleArgs(), PolicyArgs())


@pytest.fixture(scope="module")
def found():
    return search(plan(goodput=("ttft:280", "tpot:12"), only="pairs"), REQUESTS)


def test_nothing_smaller_meets_the_objective(found):
    assert found.chosen is not None and found.objective.met(found.chosen.figures)
    smaller = [each for each in found.results if each.figures.gpus < found.chosen.figures.gpus]
    assert smaller and not any(found.objective.met(each.figures) for each in smaller)
    assert found.capacity >= found.traffic.rate * 0.999


def test_what_the_closed_form_rules_out_does_miss(found):
    config = plan(goodput=("ttft:300", "tpot:8"), max_gpus=2)
    busy = synthetic(50, 100, Lengths(2048, 0.5), Lengths(120, 0.5), seed=1)
    ruled_out = search(config, busy).ruled_out
    assert ruled_out
    for each in ruled_out:
        assert not config.plan.objective.met(figures(simulate(busy, each.spec), config.plan.objective.slo))


def test_clusters_are_all_of_their_size():
    config = plan(costs=("llama-3-8b-h200", "llama-3-8b-h200-tp2"))
    tables = config.plan.tables()
    traffic = Traffic.of(REQUESTS)
    names = [each.name for each in candidates(config, tables, traffic, 3)]
    assert len(names) == len(set(names)) and all(
        each.spec.gpus == 3 for each in candidates(config, tables, traffic, 3))
    assert {"3U", "1P2D", "2P1D", "1P1Dx2", "1Px21D"} == set(names)


def test_the_frontier_has_what_no_other_beats(found):
    frontier = found.frontier()
    assert frontier == sorted(frontier, key=lambda each: each.interactivity)
    for each in found.results:
        assert any(other.interactivity >= each.interactivity and
                   other.throughput_per_gpu >= each.throughput_per_gpu * (1 - 1e-9) for other in frontier)


def test_commands_are_taken_by_the_servers(found):
    """Each printed line is parsed by the command that it names."""
    lines = [shlex.split(line) for line in commands.commands(found.chosen.candidate, "tinychat").splitlines()
             if not line.startswith("#")]
    assert [words[0] for words in lines] == ["launch_prefill", "launch_decode", "launch_router"]
    for name, *argv in lines:
        values = (read_values(RouterConfig, argv, prog=name, description="") if name == "launch_router" else
                  read_values(ServerConfig, argv, prog=name, description="", foreign=SGLANG_FLAGS))
        assert values


@pytest.mark.parametrize("cluster", ["chosen", "unified"])
def test_helm_values_fit_the_chart(found, cluster):
    candidate = found.chosen.candidate
    if cluster == "unified":
        candidate = next(each for each in candidates(
            plan(costs=("llama-3-8b-h200-tp2",)), plan(costs=("llama-3-8b-h200-tp2",)).plan.tables(),
            Traffic.of(REQUESTS), 2))
    values = yaml.safe_load(commands.helm_values(candidate, "Qwen/Qwen3-8B"))
    chart = yaml.safe_load((ROOT / "deploy/helm/baton/values.yaml").read_text())
    merged = chart | values | {"router": chart["router"] | values["router"],
                               "pools": {name: (chart["pools"][name] or {}) | values["pools"].get(name, {})
                                         for name in chart["pools"]}}
    jsonschema.validate(merged, json.loads((ROOT / "deploy/helm/baton/values.schema.json").read_text()))
    if cluster == "unified":
        assert values["mode"] == "unified" and values["pools"]["unified"]["tpSize"] == 2


def test_the_command_writes_everything(tmp_path, capsys):
    files = {flag: str(tmp_path / flag.strip("-")) for flag in ("--html", "--plot", "--output-file", "--helm-values")}
    command.main(["--rate", "6", "--num-requests", "40", "--input-len", "512", "--output-len", "32", "--goodput",
                  "ttft:500", "tpot:20", "--max-gpus", "2", "--interactivity", "20",
                  *(word for pair in files.items() for word in pair)])
    shown = capsys.readouterr().out
    assert "Cheapest: 1U, 1 GPUs" in shown and "closed form" in shown and "launch_server --model-path MODEL" in shown
    record = json.loads((tmp_path / "output-file").read_text())
    assert record["chosen"]["gpus"] == 1 and record["capacity"] > 5 and record["frontier"]
    assert "<svg" in (tmp_path / "html").read_text() and (tmp_path / "plot").read_text().startswith("<svg")
    assert yaml.safe_load((tmp_path / "helm-values").read_text())["pools"]["unified"]["replicas"] == 1


def test_a_budget_that_is_too_small_ends_with_1(capsys):
    with pytest.raises(SystemExit) as raised:
        command.main(["--rate", "50", "--num-requests", "60", "--input-len", "4096", "--goodput", "ttft:200",
                      "--max-gpus", "1"])
    assert raised.value.code == 1 and "No cluster within --max-gpus" in capsys.readouterr().out


@pytest.mark.parametrize("argv, sentence", [
    ([], "needs an objective"), (["--goodput", "ttft:1", "--attainment", "2"], "--attainment"),
    (["--interactivity", "0"], "--interactivity"), (["--goodput", "ttft:1", "--policies", "best"], "routing policy"),
    (["--goodput", "ttft:1", "--num-requests", "5"], "20 requests or more"),
    (["--goodput", "ttft:1", "--chunk-sizes", "1"], "--chunk-sizes")])
def test_errors_are_one_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as raised:
        command.main(argv)
    assert raised.value.code == 2 and sentence in capsys.readouterr().err


def test_an_objective_of_interactivity_alone():
    objective = Objective(None, 0.99, 50.0)
    run = figures(simulate(REQUESTS[:30], next(candidates(plan(), plan().plan.tables(), Traffic.of(REQUESTS), 1)).spec))
    assert objective.met(run) == (1e3 / run.normalized_p90 >= 50)
    assert not Found(objective, Traffic.of(REQUESTS)).frontier()
