"""Flags of SGLang's ``bench_serving`` that differ from ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..api.errors import ConfigError
from ..config.foreign_flags import Automatic, Foreign, ForeignFlags, Mapped, Refused, Values
from .workloads.dataset_args import DATASETS

_NO_LORA = "adapters are not supported; merge the adapter into the checkpoint"
_NO_IMAGES = "images are not sent; measure text with --dataset-name random or sharegpt"
_OTHER_API = "its API is not spoken; put a server of OpenAI's API before it and give --backend openai"
_OTHER_FILE = "its format is not read; write its requests as a ShareGPT file and give --dataset-name sharegpt"


def _trace_times(values: Sequence[str], ours: Mapping[str, Any]) -> Mapping[str, Any]:
    if not DATASETS.has(ours.get("dataset_name", ""), "times"):
        raise ConfigError("--use-trace-timestamps needs --dataset-name mooncake.")
    if values not in ((), ("true",)):
        raise ConfigError("--use-trace-timestamps takes no value but true; give --request-rate in place of it.")
    if ours.get("request_rate") is not None:
        raise ConfigError("--use-trace-timestamps and --request-rate exclude each other: leave one out.")
    return {}


def _chat_template(values: Sequence[str], ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """In chats the server applies the template."""
    return {} if ours.get("backend", "").endswith("-chat") else {"apply_chat_template": True}


_FLAGS: dict[str, Foreign] = {
    "--apply-chat-template": Mapped(_chat_template, "the same, not needed in chats"),
    "--use-trace-timestamps": Mapped(_trace_times, "a trace's own times, unless --request-rate is given", "?"),
    "--pd-separated": Automatic("a router's /start_profile reaches prefill and decode servers"),
    "--profile-prefill-url": Automatic("a router's /start_profile reaches all prefill servers", "*"),
    "--profile-decode-url": Automatic("a router's /start_profile reaches all decode servers", "*"),
    "--plot-throughput": Refused("--plot FILE draws the figures", count="0"),
    **dict.fromkeys(("--lora-name", "--lora-request-distribution", "--lora-zipf-alpha"), Refused(_NO_LORA, count="*")),
    **dict.fromkeys((
        "--image-count", "--image-resolution", "--image-format", "--image-content", "--random-image-num-images",
        "--random-image-resolution"), Refused(_NO_IMAGES)),
}

BENCH_SERVING_FLAGS = ForeignFlags(_FLAGS, {
    "--backend": Values(to={"sglang-native": "sglang", "lmdeploy": "openai", "lmdeploy-chat": "openai-chat"},
                        refused=dict.fromkeys(("trt", "gserver", "truss"), _OTHER_API)),
    "--dataset-name": Values(to={"mooncake-conversation": "mooncake"}, refused={
        **dict.fromkeys(("image", "random-image", "mmmu"), _NO_IMAGES),
        **dict.fromkeys(("agentic-trace", "burstgpt", "custom", "longbench_v2", "openai"), _OTHER_FILE)}),
}, abbreviates=True)
