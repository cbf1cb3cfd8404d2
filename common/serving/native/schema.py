"""SGLang's native ``/generate``: request and answer."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from ...api.errors import ConfigError, InvalidRequest
from ...api.messages import CustomProcessor
from ...api.sampling import SamplingParams
from ...api.token_ids import check_ids
from ...api.wire import Float32, Int32, Int64
from ...config.rules import json_object
from ..protocol.bootstrap import BootstrapFields
from ..protocol.continuation import Continuation
from ..protocol.decoding import BodyDecoder
from ..protocol.grammar_fields import grammar_field
from ..protocol.logprobs import LogprobOptions
from ..protocol.per_prompt import check_count, per_prompt
from ..protocol.prompts import Prompts, parse_prompts
from ..protocol.row_extras import custom_processor
from ..protocol.sampling import MAX_CHOICES, MAX_TOP_LOGPROBS, biases, check_range, stop_expressions, validated_params
from ..protocol.session_params import SessionParams
from ..protocol.unsupported_fields import GENERATE, SAMPLING, refuse
from .extras import Embeddings

MAX_LISTED_IDS = 1024
MAX_LISTED_LOGPROBS = 1_000_000  # of a prompt: 15 MB of the 64 MB that a prefill server's result may have


class NativeSampling(msgspec.Struct, kw_only=True):
    max_new_tokens: Int32 | None = None
    min_new_tokens: Int32 | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    top_k: Int32 | None = None
    min_p: Float32 | None = None
    n: Int32 | None = None
    seed: Int64 | None = None
    sampling_seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    repetition_penalty: Float32 | None = None
    logit_bias: dict[str, Float32] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    stream_interval: Int32 | None = None  # tokens of an event of a stream
    custom_params: dict[str, Any] | None = None  # parameters of custom_logit_processor
    # refused (see unsupported_fields.SAMPLING)
    beam_width: Any = None
    watermark: Any = None

    def fill(self, preferred: NativeSampling) -> None:
        """Sets the parameters that the request leaves out to ``preferred`` ones."""
        for name in self.__struct_fields__:
            if getattr(self, name) is None:
                setattr(self, name, getattr(preferred, name))

    def params(self, default_tokens: int, vocab_size: int) -> SamplingParams:
        """Validated sampling parameters; ``default_tokens`` is the output's length where none is requested."""
        for name in SAMPLING:
            refuse(SAMPLING, name, getattr(self, name))
        if self.stream_interval is not None and self.stream_interval < 1:
            raise InvalidRequest(f"stream_interval must be 1 or more, not {self.stream_interval}.",
                                 param="sampling_params.stream_interval")
        field = grammar_field(self)
        return validated_params(
            vocab_size, default_tokens if self.max_new_tokens is None else self.max_new_tokens, self.stop, self.top_k,
            self.stop_token_ids, stop_regex=stop_expressions(self.stop_regex), grammar=field and field.spec,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature, top_p=self.top_p,
            min_p=self.min_p, frequency_penalty=self.frequency_penalty, presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty, logit_bias=biases(self.logit_bias),
            seed=self.sampling_seed if self.seed is None else self.seed, ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens, no_stop_trim=self.no_stop_trim)


class GenerateRequest(BootstrapFields, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[Int32 | list[Int32]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    priority: Int32 | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int32 | list[Int32] | None = None
    top_logprobs_num: Int32 | list[Int32] | None = None
    token_ids_logprob: list[Int32 | list[Int32] | None] | None = None
    return_text_in_logprobs: bool | None = None
    session_params: SessionParams | None = None
    continuation: Continuation | None = None  # Baton's own
    input_embeds: Embeddings | None = None
    return_hidden_states: bool | list[bool] | None = None
    return_routed_experts: bool | list[bool] | None = None
    routed_experts_start_len: Int32 | None = None
    custom_logit_processor: str | list[str | None] | None = None
    return_prompt_token_ids: bool | None = None

    def prompts(self) -> Prompts:
        """The prompts of a request without ``input_embeds``."""
        if self.text is not None:
            return parse_prompts(self.text, "text")
        return parse_prompts(self.input_ids or [], "input_ids")

    def samplings(self, num_prompts: int) -> list[NativeSampling]:
        given = self.sampling_params
        return per_prompt("sampling_params", NativeSampling() if given is None else given, num_prompts)

    def processors(self, samplings: list[NativeSampling]) -> list[CustomProcessor | None]:
        """One entry per prompt; raises InvalidRequest."""
        named: list[str | None] = per_prompt("custom_logit_processor", self.custom_logit_processor, len(samplings))
        return [custom_processor(name, sampling.custom_params) for name, sampling in zip(named, samplings)]

    def returns_hidden_states(self, num_prompts: int) -> list[bool]:
        return per_prompt("return_hidden_states", self.return_hidden_states or False, num_prompts)


    def returns_routed_experts(self, num_prompts: int) -> list[bool]:
        return per_prompt("return_routed_experts", self.return_routed_experts or False, num_prompts)


class VertexRequest(msgspec.Struct):
    """``instances`` have one of ``text``, ``input_ids`` and ``input_embeds`` each, the same one; ``parameters`` are
    further fields of ``/generate``."""

    instances: list[dict[str, Any]]
    parameters: dict[str, Any] = {}


_decoder = BodyDecoder(GenerateRequest, GENERATE)
_vertex_decoder = BodyDecoder(VertexRequest)


@functools.cache
def preferred_sampling(text: str) -> NativeSampling:
    """Reads --preferred-sampling-params; raises ConfigError."""
    given = json_object("--preferred-sampling-params", text)
    if unknown := given.keys() - (set(NativeSampling.__struct_fields__) - {"n", *SAMPLING}):
        raise ConfigError(f"--preferred-sampling-params has {min(unknown)}, which no server sets for requests.")
    try:
        return msgspec.convert(given, NativeSampling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--preferred-sampling-params: {error}.") from None


def decode_generate(body: bytes) -> GenerateRequest:
    """Raises InvalidRequest."""
    request = _decoder.decode(body)
    if [request.text, request.input_ids, request.input_embeds].count(None) != 2:
        raise InvalidRequest("Give either text, input_ids or input_embeds.", param="text")
    check_range("priority", request.priority, -(2**31), 2**31)
    given = request.sampling_params
    for sampling in given if isinstance(given, list) else [given or NativeSampling()]:
        check_range("n", sampling.n, 1, MAX_CHOICES)
    return request


def decode_vertex(body: bytes) -> GenerateRequest:
    """Raises InvalidRequest."""
    given = _vertex_decoder.decode(body)
    if not given.instances:
        raise InvalidRequest("instances is empty; send at least one.", param="instances")
    if given.parameters.get("stream"):
        raise InvalidRequest("Predictions come as a whole; leave stream out, or use /generate.",
                             param="parameters.stream")
    name = next((name for name in ("text", "input_ids", "input_embeds") if name in given.instances[0]), "text")
    return decode_generate(msgspec.json.encode({
        **given.parameters, name: [instance.get(name) for instance in given.instances]}))


def logprob_options(request: GenerateRequest, prompt_lengths: list[int], vocab_size: int) -> list[LogprobOptions]:
    """One entry per prompt; raises InvalidRequest for values out of range."""
    count = len(prompt_lengths)
    enabled = per_prompt("return_logprob", request.return_logprob or False, count)
    start_len = -1 if request.logprob_start_len is None else request.logprob_start_len
    starts = per_prompt("logprob_start_len", start_len, count)
    tops = per_prompt("top_logprobs_num", request.top_logprobs_num or 0, count)
    listed = _listed_ids(request.token_ids_logprob or [], count, vocab_size)
    for start, top, ids, length in zip(starts, tops, listed, prompt_lengths):
        check_range("top_logprobs_num", top, 0, MAX_TOP_LOGPROBS)
        if not -1 <= start < length:
            raise InvalidRequest(f"logprob_start_len must be -1 or below the prompt's {length} tokens, got {start}.",
                                 param="logprob_start_len")
        if start >= 0 and (length - start) * len(ids) > MAX_LISTED_LOGPROBS:
            raise InvalidRequest(
                f"token_ids_logprob asks for {len(ids)} logprobs at each of {length - start} prompt tokens, more than "
                f"{MAX_LISTED_LOGPROBS} together; raise logprob_start_len.", param="token_ids_logprob")
    return [LogprobOptions(*options) for options in zip(enabled, starts, tops, listed)]


def _listed_ids(given: list[int | list[int] | None], count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """``token_ids_logprob`` of each prompt: one list for all of them, or a list (or null) each."""
    for_all = [item for item in given if isinstance(item, int)]
    each = [item or [] for item in given if not isinstance(item, int)]
    if for_all and each:
        raise InvalidRequest("token_ids_logprob must not mix token ids and lists.", param="token_ids_logprob")
    lists = each or [for_all] * count
    check_count("token_ids_logprob", lists, count)
    for ids in filter(None, lists):
        if len(ids) > MAX_LISTED_IDS:
            raise InvalidRequest(f"token_ids_logprob must name {MAX_LISTED_IDS} tokens at most, got {len(ids)}.",
                                 param="token_ids_logprob")
        check_ids(ids, vocab_size, "token_ids_logprob")
    return [tuple(ids) for ids in lists]


class GenerateAnswer(msgspec.Struct, omit_defaults=True):
    """``index`` identifies an answer of a batch in a stream."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | None = None
    prompt_token_ids: list[int] | None = None
