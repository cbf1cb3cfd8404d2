"""Logit processors in SGLang's serialized form: unpickled with its classes' stand-ins, and run like imported ones."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import cloudpickle
import dill
import pytest
import torch

from baton.common.api.errors import InvalidRequest
from baton.common.request.logit_processors import RequestTokens, RowProcessor, load
from baton.common.request.token_buffer import TokenBuffer
from baton.common.sampling import sglang_processors
from baton.common.sampling.sglang_processors import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
    ThinkingBudgetLogitProcessor,
)
from baton.common.serving.protocol.row_extras import MAX_SERIALIZED_PROCESSOR, custom_processor

VOCAB = 16


def local_class(base: type = CustomLogitProcessor) -> type:
    class Always(base):
        KEY = "token_id"

        def __call__(self, logits, custom_param_list):
            for row, params in enumerate(custom_param_list):
                logits[row] = -float("inf")
                logits[row, params[self.KEY]] = 0.0
            return logits

    return Always


def run(serialized: str, *params: dict) -> torch.Tensor:
    assert custom_processor(serialized, {}) is not None
    return load(serialized)(torch.zeros(len(params), VOCAB), list(params))


def tokens(prompt: list[int], output: list[int] = []) -> RequestTokens:  # noqa: B006
    return RequestTokens(TokenBuffer([*prompt, *output]), 0, len(prompt))


@pytest.mark.parametrize("dump", [dill.dumps, cloudpickle.dumps])
def test_a_class_by_value(dump) -> None:
    serialized = json.dumps({"callable": dump(local_class()).hex()})
    assert run(serialized, {"token_id": 3}, {"token_id": 5}).argmax(1).tolist() == [3, 5]
    assert load(serialized) is load(serialized)


def test_of_a_client_that_has_sglang(tmp_path: Path) -> None:
    """Another process, with a module of SGLang's name: the server does not have it."""
    module = tmp_path / "sglang/srt/sampling/custom_logit_processor.py"
    module.parent.mkdir(parents=True)
    module.write_text("class CustomLogitProcessor:\n    pass\n\n\nclass DisallowedTokensLogitsProcessor:\n    pass\n")
    script = textwrap.dedent("""
        import dill, json
        from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor

        class Mine(CustomLogitProcessor):
            def __call__(self, logits, params):
                logits[:, 7] = 1.0
                return logits

        for found in (Mine, DisallowedTokensLogitsProcessor):
            print(json.dumps({"callable": dill.dumps(found).hex()}))
        """)
    (tmp_path / "client.py").write_text(script)
    told = subprocess.run([sys.executable, "client.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    mine, disallowed = told.stdout.splitlines()
    assert run(mine, {}).argmax().item() == 7
    assert run(disallowed, {"token_ids": [1, 2]})[0, :4].tolist() == [0, -torch.inf, -torch.inf, 0]
    assert isinstance(load(mine), CustomLogitProcessor) and type(load(disallowed)) is DisallowedTokensLogitsProcessor


def test_its_own_form() -> None:
    serialized = DisallowedTokensLogitsProcessor.to_str()
    assert type(CustomLogitProcessor.from_str(serialized)) is DisallowedTokensLogitsProcessor
    assert custom_processor(serialized, {"token_ids": [1]}).params == {"token_ids": [1]}


def test_rows_are_grouped_by_equal_processors() -> None:
    texts = [json.dumps({"callable": dill.dumps(local_class()).hex()}), DisallowedTokensLogitsProcessor.to_str()]
    names = [RowProcessor.of(text, {}, tokens([1])).path for text in (*texts, *texts)]
    assert names[:2] == names[2:] and len(set(names)) == 2 and all(len(name) < 40 for name in names)


class Bomb:
    def __reduce__(self):
        return eval, ("1 / 0",)


class Exits:
    def __reduce__(self):
        return sys.exit, (3,)


@pytest.mark.parametrize("data, why", [
    (dill.dumps(3), "is no callable"), (b"\x80\x04", "cannot be unpickled here"), (b"", "cannot be unpickled here"),
    (dill.dumps(Bomb()), "ZeroDivisionError"), (dill.dumps(Exits()), "SystemExit"),
    (b"cno_such_module\nName\n.", "No module named 'no_such_module'"),
    (b"csglang.srt.sampling.custom_logit_processor\nNoSuchName\n.", "ModuleNotFoundError"),
    (dill.dumps(CustomLogitProcessor), "TypeError")])
def test_what_cannot_be_unpickled_is_refused(data: bytes, why: str) -> None:
    serialized = json.dumps({"callable": data.hex()})
    with pytest.raises(InvalidRequest, match=why) as error:
        load(serialized)
    assert error.value.param == "custom_logit_processor" and "serialized" in error.value.message


@pytest.mark.parametrize("given, why", [
    ("{", "hexadecimal"), ("{}", "hexadecimal"), ('{"callable": "xy"}', "hexadecimal"),
    ('{"callable": 3}', "hexadecimal"),
    (json.dumps({"callable": "00" * MAX_SERIALIZED_PROCESSOR}), "may have 262144")])
def test_what_is_no_serialized_processor_is_refused_by_the_api_server(given: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        custom_processor(given, None)


def test_without_dill_its_pickles_are_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.common.request import serialized_processors
    serialized = json.dumps({"callable": dill.dumps(local_class()).hex()})
    for name in [name for name in sys.modules if name.split(".")[0] == "dill"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dill", None)
    serialized_processors._unpickler_class.cache_clear()
    try:
        with pytest.raises(InvalidRequest, match="dill"):
            load(serialized.replace("{", "{ "))
    finally:
        serialized_processors._unpickler_class.cache_clear()


def test_thinking_budgets_of_models() -> None:
    class Mine(ThinkingBudgetLogitProcessor):
        THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 1, 2, 3

    def forced(prompt: list[int], output: list[int], budget: object) -> int | None:
        row = Mine()(torch.zeros(1, VOCAB), [{"thinking_budget": budget, "__req__": tokens(prompt, output)}])[0]
        return int(row.argmax()) if row.isinf().any() else None

    assert forced([9, 1], [5], 2) is None and forced([9, 1], [5, 6], 2) == 3 and forced([9, 1], [5, 6, 3], 2) == 2
    assert forced([9, 1], [5, 6, 2, 7], 2) is None and forced([9], [5, 6, 7], 2) is None
    assert forced([9, 1], [5, 6], None) is None and forced([9, 1], [5, 6], -1) is None and forced([9, 1], [], 0) == 3
    for name in ("Qwen3", "DeepSeekR1", "Glm4Moe"):
        assert issubclass(getattr(sglang_processors, f"{name}ThinkingBudgetLogitProcessor"),
                          ThinkingBudgetLogitProcessor)


@pytest.mark.parametrize("size, window, allowed, banned", [
    (2, 10, [], {5}), (2, 10, [5], set()), (2, 3, [], set()), (1, 2, [], {4, 6}), (3, 10, [], set()),
    (9, 10, [], set()), (0, 10, [], set())])
def test_n_grams_do_not_repeat(size: int, window: int, allowed: list[int], banned: set[int]) -> None:
    params = {"ngram_size": size, "window_size": window, "whitelist_token_ids": allowed,
              "__req__": tokens([4, 5], [7, 6, 4])}
    row = DeepseekOCRNoRepeatNGramLogitProcessor()(torch.zeros(1, VOCAB), [params])[0]
    assert set(row.isinf().nonzero().flatten().tolist()) == banned
