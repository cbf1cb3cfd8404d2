"""A draft model's own format, source of weights, attention backend and type of KV cache: answers stay the model's."""

from functools import cache

import pytest

from baton.common.api.errors import ConfigError
from baton.tests.helpers.acceptance_parity import BASE, ROOMY, algorithm_flags, questions, started_pair
from baton.tests.helpers.flag_engine import Answer, FlagEngine

EAGLE3 = algorithm_flags("EAGLE3")
FLOAT8 = ("--speculative-draft-kv-cache-dtype", "fp8_e4m3")


@cache
def plain() -> list[list[int]]:
    return [answer.tokens for answer in FlagEngine(*BASE, *ROOMY).answers(questions(4))]


def acceptance_length(answers: list[Answer]) -> float:
    """Tokens of a verify step; the answers must be those of plain decoding."""
    assert [answer.tokens for answer in answers] == plain()
    steps = [length for answer in answers for _, _, length in answer.verified]
    return sum(steps) / len(steps)


@pytest.mark.parametrize(("algorithm", "flags", "least"), [
    ("EAGLE3", ("--speculative-draft-model-quantization", "fp8"), 2.0),
    ("STANDALONE", ("--speculative-draft-model-quantization", "int8wo"), 1.5),
    ("NEXTN", ("--speculative-draft-model-quantization", "unquant", "--speculative-draft-load-format", "layered"), 2.0),
    ("STANDALONE", ("--speculative-draft-attention-backend", "torch"), 1.5),
    ("EAGLE3", ("--speculative-draft-load-format", "dummy", *FLOAT8), 1.0)], ids=str)
def test_answers_and_acceptance(algorithm, flags, least):
    engine = FlagEngine(*BASE, *ROOMY, *algorithm_flags(algorithm), *flags)
    assert acceptance_length(engine.answers(questions(4))) >= least
    if FLOAT8[0] in flags:
        assert engine.parts.runner.draft_pool.layout.dtype == "float8_e4m3fn"
        assert engine.parts.runner.pool.layout.dtype == "float32"


def test_pages_of_another_type_travel_with_the_models():
    with started_pair(FLOAT8, EAGLE3) as engines:
        assert acceptance_length(engines.answers(questions(4))) > 2.0


@pytest.mark.parametrize(("flags", "sentence"), [
    (("--speculative-draft-attention-backend", "flashinfer"), "--speculative-draft-attention-backend flashinfer"),
    (("--speculative-draft-model-quantization", "gptq"), "--speculative-draft-model-quantization gptq"),
    (("--speculative-draft-load-format", "gguf"), "--speculative-draft-load-format gguf"),
])
def test_what_cannot_run_names_the_drafts_flag(flags, sentence):
    with pytest.raises(ConfigError, match=sentence):
        FlagEngine(*BASE, *ROOMY, *EAGLE3, *flags)
