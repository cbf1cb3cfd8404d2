"""Flags of answers: extras that requests may ask for, parsers, grammars."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...api.errors import ConfigError
from ...parsers.reasoning import REASONING_FORMATS
from ...parsers.tools import TOOL_FORMATS
from ...registry import Choices, Registry
from ..cli import flag
from ..rules import Rule, ServerRule, check_own_rules, json_object

if TYPE_CHECKING:
    from ...grammar.backend import GrammarBackend

GRAMMAR_BACKENDS: Registry[GrammarBackend] = Registry("grammar backend", "baton.common.grammar")
_TOOL_CHOICES = Choices.of(TOOL_FORMATS, others=("auto", "none"))
_REASONING_CHOICES = Choices.of(REASONING_FORMATS, others=("none",))


@dataclass(frozen=True)
class AnswerArgs:
    """Extras that requests may ask for; prefill and decode servers need the same."""

    enable_cache_report: bool = flag(True, help="report in usage how many prompt tokens the prefix cache had")
    enable_custom_logit_processor: bool = flag(False, help=(
        "let requests bring a logit processor, as MODULE:NAME that this server imports or as SGLang's clients "
        "serialize it: whoever may send requests may then run any code here"))
    enable_return_hidden_states: bool = flag(False, help="let requests ask for the model's hidden states")
    enable_return_routed_experts: bool = flag(False, help=(
        "let requests to /generate ask for the experts that each layer chose for each token"))
    preferred_sampling_params: str | None = flag(None, metavar="JSON", help=(
        "a JSON object of sampling parameters, for requests to /generate that leave them out; /get_model_info reports "
        "it"))
    allow_auto_truncate: bool = flag(False, help=(
        "shorten prompts that exceed the context length to their beginning, and lower max_tokens to what is left, "
        "instead of refusing such requests"))
    stream_output: bool = flag(False, names=("--incremental-streaming-output",), help=(
        "give in each event of a stream of /generate the text and the output_ids since the event before, not those so "
        "far"))

    sampling_defaults: Literal["openai", "model"] = flag("openai", help=(
        "what chats and completions are sampled with where they leave it out. openai: temperature 1, without top_p and "
        "the like. model: what the checkpoint's generation_config.json recommends (temperature, top_p, top_k, min_p, "
        "repetition_penalty)"))
    default_chat_template_kwargs: str | None = flag(None, metavar="JSON", help=(
        "a JSON object of chat_template_kwargs for chats that leave them out, as {\"enable_thinking\": false}"))
    trust_request_chat_template: bool = flag(False, help=(
        "let chats bring a chat_template: a program in a sandbox, whose loops may keep this server busy, so only where "
        "clients are trusted"))
    return_input_ids: bool = flag(False, help=(
        "add the prompt's token ids to each answer of /v1/chat/completions, as sglext.input_ids"))
    return_output_ids: bool = flag(False, help="and each choice's token ids, as sglext.output_ids")
    stream_response_default_include_usage: bool = flag(False, help=(
        "end streams of chats and completions with their usage, unless stream_options.include_usage is false"))

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.answers.enable_return_hidden_states and c.parallel.pp_size > 1,
             "--enable-return-hidden-states does not work across the stages of --pp-size: leave one of them out."),
        Rule(lambda c: c.answers.enable_return_routed_experts and (
            c.parallel.pp_size > 1 or c.dp_size > 1 or c.parallel.moe_a2a_backend != "none"),
             "--enable-return-routed-experts needs ranks that choose the experts of all layers and tokens: leave "
             "--pp-size, --enable-dp-attention and --moe-a2a-backend out."),
        Rule(lambda c: c.answers.enable_return_routed_experts and (
            c.speculative.speculative_algorithm is not None or c.model.is_embedding
            or c.model.model_impl == "transformers"),
             "--enable-return-routed-experts is for servers that generate by Baton's own layers, without drafts: leave "
             "--speculative-algorithm, --is-embedding and --model-impl transformers out."),
    )

    def __post_init__(self) -> None:
        if self.preferred_sampling_params is not None:
            json_object("--preferred-sampling-params", self.preferred_sampling_params)
        if self.default_chat_template_kwargs is not None:
            json_object("--default-chat-template-kwargs", self.default_chat_template_kwargs)

    @property
    def template_defaults(self) -> dict[str, Any]:
        """The variables of --default-chat-template-kwargs."""
        text = self.default_chat_template_kwargs
        return {} if text is None else json_object("--default-chat-template-kwargs", text)


@dataclass(frozen=True)
class ChatArgs:
    tool_call_parser: str = flag("auto", choices=_TOOL_CHOICES, help=(
        "how the model writes tool calls; auto chooses by its chat template, none parses nothing"))
    reasoning_parser: str | None = flag(None, choices=_REASONING_CHOICES, help=(
        "how the model writes its reasoning, which is then returned apart from the answer"))

    def __post_init__(self) -> None:
        for name, given, choices in (("--tool-call-parser", self.tool_call_parser, _TOOL_CHOICES),
                                     ("--reasoning-parser", self.reasoning_parser, _REASONING_CHOICES)):
            if given is not None and given not in choices.shown:
                raise ConfigError(f"{name} {given} is unknown; it is one of {', '.join(sorted(choices.shown))}.")


@dataclass(frozen=True)
class GrammarArgs:
    grammar_backend: str = flag("xgrammar", choices=Choices.of(GRAMMAR_BACKENDS, others=("none",)), help=(
        "library that constrains answers to a JSON schema, regular expression or grammar; outlines is llguidance; none "
        "refuses such requests"))
    constrained_json_whitespace_pattern: str | None = flag(None, help=(
        "regular expression for the white space between the elements of JSON answers; without it any is allowed"))
    constrained_json_disable_any_whitespace: bool = flag(False, help=(
        "allow no white space between the elements of JSON answers"))

    own_flag_rules: ClassVar[tuple[Rule[GrammarArgs], ...]] = (
        Rule(lambda c: c.constrained_json_whitespace_pattern is not None and c.constrained_json_disable_any_whitespace,
             "--constrained-json-whitespace-pattern and --constrained-json-disable-any-whitespace exclude each other; "
             "give one of them."),
    )

    def __post_init__(self) -> None:
        check_own_rules(self)
        pattern = self.constrained_json_whitespace_pattern
        if pattern is None:
            return
        try:
            matched = re.fullmatch(pattern, "") or re.fullmatch(pattern, " ") or re.fullmatch(pattern, "\n")
        except re.error as error:
            raise ConfigError(f"--constrained-json-whitespace-pattern {pattern!r} is no regular expression: "
                              f"{error}.") from None
        if not matched:
            raise ConfigError(f"--constrained-json-whitespace-pattern {pattern!r} matches neither nothing, a space nor "
                              "a newline; it is to match white space.")

    @property
    def whitespace(self) -> str | None:
        """Regular expression for the white space in JSON; None for any."""
        return "" if self.constrained_json_disable_any_whitespace else self.constrained_json_whitespace_pattern
