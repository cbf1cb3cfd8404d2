"""Workloads: published formats of traces, synthetic arrivals and lengths, prompts that share tokens."""

import json

import numpy as np
import pytest

from baton.common.api.errors import ConfigError
from baton.simulate.args import WorkloadArgs
from baton.simulate.workload.formats.base import read_trace
from baton.simulate.workload.make import make_workload
from baton.simulate.workload.request import SimRequest, rate_of
from baton.simulate.workload.synthetic import Lengths, arrivals
from baton.simulate.world.requests import Prompts

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
MOONCAKE = "\n".join(json.dumps({"timestamp": at, "input_length": 1100, "output_length": 7, "hash_ids": ids})
                     for at, ids in ((3000, [1, 2, 4]), (0, [1, 2, 3])))
SHAREGPT = json.dumps([{"conversations": [{"from": "human", "value": "q" * 400}, {"from": "gpt", "value": "a" * 80},
                                          {"from": "human", "value": "q" * 40}, {"from": "gpt", "value": "a" * 8}]}])


def written(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    return str(path)


def shape(requests):
    return [(each.at, each.input_len, each.output_len) for each in requests]


@pytest.mark.parametrize("text, expected", [
    (AZURE, [(0, 4808, 10), (pytest.approx(0.052), 3180, 8)]),
    (BURST, [(0, 472, 18), (40, 1087, 230)]),  # without the request that has no response
    (MOONCAKE, [(0, 1100, 7), (3, 1100, 7)]),
    (SHAREGPT, [(0, 100, 20), (0, 130, 2)]),
], ids=["azure", "burstgpt", "mooncake", "sharegpt"])
def test_formats_are_found_by_their_first_line(tmp_path, text, expected):
    assert shape(read_trace(written(tmp_path, text), None, None)) == expected


def test_first_requests_only(tmp_path):
    assert len(read_trace(written(tmp_path, AZURE), "azure", 1)) == 1


@pytest.mark.parametrize("text, name, sentence", [
    ("hello\n", None, "begins like no trace"), (AZURE, "mooncake", "no request of a trace"),
    ("a,b\n1,2\n", "azure", "not in this trace format"), (BURST.splitlines()[0] + "\n", None, "no requests")])
def test_what_cannot_be_read_is_said(tmp_path, text, name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read_trace(written(tmp_path, text), name, None)


def test_a_trace_is_stretched_to_a_rate(tmp_path):
    path = written(tmp_path, BURST)
    assert rate_of(make_workload(WorkloadArgs(trace=path, rate=2.0))) == pytest.approx(2.0)
    timed = make_workload(WorkloadArgs(trace=written(tmp_path, SHAREGPT), rate=2.0))
    assert timed[0].at < timed[1].at
    with pytest.raises(ConfigError, match="--rate"):
        make_workload(WorkloadArgs(trace=written(tmp_path, SHAREGPT)))


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_their_rate_and_variation(cv):
    gaps = np.diff(arrivals(5.0, 20_000, cv, np.random.default_rng(1)))
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06, abs=1e-9)


def test_lengths_have_their_mean_and_variation():
    drawn = Lengths.parse("800:0.5", "--input-len").draw(np.random.default_rng(1), 20_000)
    assert drawn.mean() == pytest.approx(800, rel=0.02) and drawn.std() / drawn.mean() == pytest.approx(0.5, rel=0.05)
    assert drawn.min() >= 1
    for wrong in ("0", "x", "10:-1", "10:x", "nan"):
        with pytest.raises(ConfigError, match="--input-len"):
            Lengths.parse(wrong, "--input-len")


def test_prompts_share_what_their_blocks_say():
    prompts = Prompts()
    first, second, third = (prompts.tokens(SimRequest(0, 1100, 1, blocks)) for blocks in ((1, 2, 9), (1, 3), (1, 2)))
    assert len(first) == 1100 and np.array_equal(first[:512], second[:512])
    assert not np.any(first[512:1024] == second[512:1024])
    assert np.array_equal(first[:1024], third[:1024]) and not np.any(np.isin(first[1024:], third[1024:]))


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"num_requests": 0}, {"shared_prefix_groups": 2},
                                   {"input_len": "none"}, {"arrival_cv": -1}])
def test_bad_workload_flags_are_refused(wrong):
    with pytest.raises(ConfigError):
        WorkloadArgs(**wrong)
