"""A deterministic server gives requests a seed."""

from __future__ import annotations

import dataclasses

from baton.common.api.sampling import SamplingParams
from baton.common.config.server import KernelArgs
from baton.common.serving.context.request_planner import RequestPlanner
from baton.tests.helpers.small_models import server_config


def planner(deterministic: bool) -> RequestPlanner:
    found = RequestPlanner.__new__(RequestPlanner)
    kernels = KernelArgs(enable_deterministic_inference=deterministic)
    found._config = dataclasses.replace(server_config("model"), kernels=kernels)
    return found


def test_requests_without_a_seed_have_42():
    given = [SamplingParams(), SamplingParams(seed=0), SamplingParams(seed=7)]
    assert [one.seed for one in planner(True).seeded(given)] == [42, 0, 7]
    assert planner(False).seeded(given) is given
