"""The policy of an H200, for tests without one."""

from __future__ import annotations

from dataclasses import replace

from baton.kernels.device import DeviceFacts
from baton.kernels.tuning.policy import Policy

NUM_SMS = 132
FACTS = DeviceFacts("NVIDIA H200", NUM_SMS, 227 << 10, runs_triton=True, runs_gluon=True, is_hopper=True)


def policy_of_h200(name: str = FACTS.name, num_sms: int = NUM_SMS, runs_gluon: bool = True) -> Policy:
    return Policy.load(replace(FACTS, name=name, num_sms=num_sms, runs_gluon=runs_gluon))


H200 = policy_of_h200()
