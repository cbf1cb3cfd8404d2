"""The policy of a device: measured numbers over rules, and rules alone for a GPU that nobody has measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from baton.kernels.device import device_name, device_slug, is_hopper, num_sms
from baton.kernels.tuning.policy import Policy, policy_of

from .h200 import FACTS, H200, NUM_SMS

H100_PCIE = replace(FACTS, name="NVIDIA H100 PCIe", num_sms=114)
L40S = replace(FACTS, name="NVIDIA L40S", num_sms=142, shared_bytes=99 << 10, runs_gluon=False, is_hopper=False)


def test_a_file_replaces_what_it_names_and_no_more(tmp_path):
    (tmp_path / "Some_GPU.json").write_text(json.dumps({
        "gemm": {"split_k": {"max_rows": 96, "whole": {"stages": 3}}}, "attention": {"wide": {"warps": 8}},
        "all_to_all": {"combine": {"programs": 7}}}))
    some = replace(FACTS, name="Some GPU")
    measured, rule = Policy.load(some, tmp_path), Policy.load(replace(FACTS, name="another"), tmp_path)
    assert measured.gemm.numbers.split_k == replace(
        rule.gemm.numbers.split_k, max_rows=96, whole=replace(rule.gemm.numbers.split_k.whole, stages=3))
    assert measured.gemm.numbers.small_m == rule.gemm.numbers.small_m
    assert measured.attention.numbers.wide == rule.attention.numbers.wide._replace(warps=8)
    assert measured.all_to_all.combine == rule.all_to_all.combine._replace(programs=7)
    assert measured.float8.numbers == rule.float8.numbers


@pytest.mark.parametrize("content", [{"gemm": {"small_m": {"rows": 1}}}, {"attention": {"wide": {"columns": 1}}}])
def test_a_name_that_no_rule_has_is_an_error(tmp_path, content):
    (tmp_path / "Some_GPU.json").write_text(json.dumps(content))
    with pytest.raises((AttributeError, TypeError, ValueError)):
        Policy.load(replace(FACTS, name="Some GPU"), tmp_path)


def test_an_unmeasured_hopper_chooses_nearly_as_an_h200():
    """The rules give an H200's own numbers, where these follow from its SMs and shared memory."""
    rule = Policy.load(replace(FACTS, name="unmeasured"))
    assert rule.float8.numbers == H200.float8.numbers and rule.all_to_all == H200.all_to_all
    assert rule.attention.numbers == H200.attention.numbers
    for rows, (out, width) in itertools.product((1, 8, 16, 20, 32), ((6144, 4096), (28672, 4096), (1024, 2048))):
        assert rule.gemm.persistent(rows, out, width) == H200.gemm.persistent(rows, out, width)
        assert rule.gemm.small_m(rows, out, width, torch.bfloat16) == H200.gemm.small_m(rows, out, width,
                                                                                        torch.bfloat16)


@pytest.mark.parametrize("facts", [H100_PCIE, L40S], ids=lambda facts: facts.name)
def test_a_gpu_without_a_file_fills_its_own_sms(facts):
    policy = Policy.load(facts)
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048)]
    for rows, (out, width) in itertools.product((2, 16, 32, 64), shapes):
        tile = policy.gemm.small_m(rows, out, width, torch.bfloat16)
        assert tile.splits == 1 or -(-out // tile.columns) * tile.splits <= 2 * facts.num_sms
        assert tile.stages * (tile.columns + max(16, rows)) * tile.depth * 2 <= facts.shared_bytes
        fp8 = policy.float8.tile("row", rows, out, width)
        assert fp8.splits == 1 or -(-out // fp8.columns) * fp8.splits <= 2 * facts.num_sms
    splits = policy.gemm.split_k(100, 28672, 4096, 2), policy.gemm.fused_reduce(100, 4096, 4096, 2)
    assert facts.runs_gluon == any(splits)
    assert policy.all_to_all.dispatch.programs == facts.num_sms
    assert policy.attention.numbers.few_kv_heads == 2 * facts.num_sms != H200.attention.numbers.few_kv_heads


def test_facts_of_a_cpu():
    cpu = torch.device("cpu")
    assert device_name(cpu) == "cpu" and num_sms(cpu) < NUM_SMS and not is_hopper(cpu)
    assert device_slug("NVIDIA H200") == "NVIDIA_H200"
    facts = policy_of(cpu).facts
    assert not facts.runs_gluon and policy_of(cpu) is policy_of(cpu)


def test_choices_are_looked_up_once(monkeypatch):
    """A decode step asks for the same shapes again and again."""
    policy = Policy.load(FACTS)
    first = policy.gemm.small_m(8, 6144, 4096, torch.bfloat16)
    monkeypatch.setattr(type(policy.gemm), "_large_small_m", None)
    assert policy.gemm.small_m(8, 6144, 4096, torch.bfloat16) is first
