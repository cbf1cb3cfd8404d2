"""The plug-in that brings the toy speculative algorithm into a server's processes."""

from __future__ import annotations

from baton.common.config.server.speculative import SPECULATIVE_ALGORITHMS
from baton.common.speculative.base import Algorithm
from baton.tests.helpers.toy_proposer import RepeatLastTokens

SPECULATIVE_ALGORITHMS.register("TOY_REPEAT")(Algorithm(
    make_proposer=lambda config: RepeatLastTokens(config.speculative)))
