"""Flags of the model: checkpoint, type, device."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...api.errors import ConfigError
from ...registry import Choices
from ..cli import flag
from ..load_format import LOAD_FORMATS
from ..quantization import QUANTIZATIONS
from ..rules import Rule, ServerRule, at_least, json_object


@dataclass(frozen=True)
class ModelArgs:
    model_path: str = flag(required=True, names=("--model",), help=(
        "local checkpoint folder or GGUF file, Hugging Face hub id, a folder's address (https://, s3://, redis://), or "
        "'tinychat' for the chat model that ships with Baton"))
    tokenizer_path: str | None = flag(None, help="tokenizer folder or hub id, when it is not the model's")
    skip_tokenizer_init: bool = flag(False, help=(
        "load no tokenizer: requests have token ids, and answers token ids without texts"))
    revision: str | None = flag(None, help="hub revision of the model")
    download_dir: str | None = flag(None, help=(
        "folder for downloads from the hub, by default Hugging Face's own, which HF_HOME names, and of other addresses "
        "of --model-path"))
    trust_remote_code: bool = flag(False, help=(
        "run the code of a tokenizer that its checkpoint ships, in this process, with all that it may read and reach: "
        "only for checkpoints that you trust as you trust a program. Ranks run a model's code so, too, where neither "
        "Baton nor transformers has its architecture"))
    json_model_override_args: str = flag("{}", metavar="JSON", help=(
        "a JSON object whose values replace those of config.json, e.g. {\"num_hidden_layers\": 4}"))
    model_fingerprint: str | None = flag(None, help=(
        "name of the weights in place of a fingerprint of the checkpoint: prefill and decode servers are paired when "
        "theirs are equal, so give two equivalent checkpoints (a model and its copy in float8) the same name; "
        "weights that are loaded at run time have a fingerprint of their own again"))
    served_model_name: str | None = flag(None, help="model name in the API; by default --model-path")
    weight_version: str = flag("default", help=(
        "a name for the weights, in the answers of /generate, /get_weight_version and /get_model_info"))
    enable_pickled_weights: bool = flag(False, help=(
        "let /update_weights_from_tensor take tensors as SGLang's clients pickle them, on GPUs as handles of their "
        "memory: only where all that reach the endpoint are trusted with the server"))
    checkpoint_engine_wait_weights_before_ready: bool = flag(False, help=(
        "take no requests, and let /health say so, until a trainer has sent the first weights, by any of the endpoints "
        "that update them"))
    load_format: str = flag("auto", choices=Choices.of(LOAD_FORMATS), help=(
        "source of the weights: auto is safetensors (Mistral's consolidated ones, too), or torch's .bin or .pt files "
        "(pt), or a GGUF file (gguf), where there are no others; layered is the same; npcache reads pt by way of a "
        "copy in numpy's files; remote reads safetensors at an address, runai_streamer by the package "
        "of this name; sharded_state is what /save_sharded_model has written; dummy fills "
        "them with random values, for benchmarks without a checkpoint; remote_instance takes them from a running "
        "server"))
    custom_weight_loader: tuple[str, ...] = flag((), some=True, help=(
        "functions by their import paths, package.module.function, that load_format of /update_weights_from_tensor may "
        "name: function(model, named_tensors) gets what a trainer sends, and calls model.load_weights with tensors of "
        "the checkpoint's names"))
    weight_loader_disable_mmap: bool = flag(False, help=(
        "read safetensors files by plain reads of what a rank needs, instead of mapping them: for file systems whose "
        "mappings are slow"))
    model_checksum: str | None = flag(None, bare="", metavar="SOURCE", help=(
        "compare the checkpoint's files with SHA-256 sums before they are loaded: those of a JSON file, "
        "{\"checksums\": {\"model.safetensors\": \"…\"}}, or of a repository on the hub; without a value of "
        "--model-path's"))
    model_loader_extra_config: str = flag("{}", metavar="JSON", help=(
        "a JSON object of the loader's settings: {\"enable_multithread_load\": true, \"num_threads\": 8} reads so many "
        "safetensors files ahead, each by a thread, for file systems on which one reader is slow, and copies as many "
        "tensors at a time; false copies one at a time, and without it four are copied at a time"))
    weight_loader_drop_cache_after_load: bool = flag(False, help=(
        "let the system forget the pages of the weights' files once they are loaded, for hosts whose memory others "
        "need"))
    delete_ckpt_after_loading: bool = flag(False, help=(
        "remove the weights' files of the folder --model-path once they are loaded, for hosts with little disk; the "
        "other files stay"))
    remote_instance_weight_loader_seed_instance_ip: str | None = flag(None, help=(
        "host of the running server whose weights --load-format remote_instance takes; it has the same model, --dtype "
        "and parallel sizes, and the same admin or API key"))
    remote_instance_weight_loader_seed_instance_service_port: int | None = flag(None, help=(
        "HTTP port of that server"))
    remote_instance_weight_loader_send_weights_group_ports: str | None = flag(None, metavar="JSON", help=(
        "free ports of that server's host, one for each rank, as a JSON list: [29600, 29601]"))
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", help="type of weights and KV cache; auto is the checkpoint's on a GPU and float32 on a CPU")
    quantization: str | None = flag(None, choices=Choices.of(QUANTIZATIONS), help=(
        "format of linear layers' weights: fp8 has weights and activations in float8, with a scale for each output and "
        "each token, fp8_per_tensor one for each projection, fp8_per_block one for blocks of 128 x 128; checkpoints "
        "that are quantized need no flag"))
    model_impl: Literal["auto", "baton", "transformers"] = flag("auto", help=(
        "implementation of the model: Baton's own, or transformers' code over Baton's attention and linear layers; "
        "auto is Baton's own where there is one"))
    context_length: int | None = flag(None, help="longest prompt plus output in tokens; by default the model's")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", help="where the engine runs; auto prefers a GPU")
    base_gpu_id: int = flag(0, help="index of the first GPU to use; tensor-parallel ranks take the following ones")
    gpu_id_step: int = flag(1, help="distance between the GPUs of ranks: with 2 they take every other one")
    is_embedding: bool = flag(False, help=(
        "serve embeddings (or a classifier's scores) instead of generating; encoders need no flag"))
    pooling: Literal["auto", "last", "mean", "cls"] = flag("auto", help=(
        "hidden state that becomes the embedding: the last token's, the mean of all, or the first token's (cls); auto "
        "reads the checkpoint's 1_Pooling/config.json, and without it is last, of encoders cls"))
    random_seed: int = flag(0, help="seed of dummy weights and of unseeded sampling")
    return_original_logprob: bool = flag(False, help=(
        "return log-probabilities of the output before temperature (penalties and bias count in both cases)"))
    chat_template: str | None = flag(None, help=(
        "jinja file, SGLang's JSON conversation template, or the name of a template that ships with Baton, in place of "
        "the checkpoint's chat template"))
    hf_chat_template_name: str | None = flag(None, metavar="NAME", help=(
        "which of the checkpoint's chat templates to use, where it has several (default, tool_use, rag); without it "
        "tool_use where there is one and a chat has tools, else default"))
    completion_template: Literal["deepseek_coder", "star_coder", "qwen_coder"] | None = flag(None, help=(
        "how a code model gets a prompt and its suffix, for the field suffix of /v1/completions"))

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.model.delete_ckpt_after_loading and c.model.load_format == "dummy",
             "--delete-ckpt-after-loading removes what was loaded, and --load-format dummy loads nothing: leave one of "
             "them out."),
        Rule(lambda c: c.model.from_instance and c.parallel.pp_size > 1,
             "--load-format remote_instance takes the weights of a server without stages: leave --pp-size out."),
        Rule(lambda c: c.model.from_instance and c.speculative.is_device,
             "--load-format remote_instance takes the weights of the model alone: leave --speculative-algorithm out, "
             "or load the checkpoint."),
        Rule(lambda c: c.model.from_instance and c.parallel.enable_eplb,
             "--load-format remote_instance takes weights in their first places: leave --enable-eplb out."),
        Rule(lambda c: c.model.checkpoint_engine_wait_weights_before_ready and c.model.is_embedding,
             "--checkpoint-engine-wait-weights-before-ready is for servers that generate: leave it out with "
             "--is-embedding."),
        Rule(lambda c: c.model.is_embedding and not c.role.serves_alone,
             "--is-embedding needs a unified server: leave --disaggregation-mode at null."),
        Rule(lambda c: c.model.model_impl == "transformers" and (
            c.parallel.pp_size > 1 or c.parallel.ep_size > 1 or c.dp_size > 1),
             "--model-impl transformers splits a model over --tp-size alone: leave --pp-size, --ep-size and "
             "--enable-dp-attention out."),
        Rule(lambda c: c.model.model_impl == "transformers" and c.speculative.is_device,
             "--model-impl transformers shares no hidden states, embedding or head with a draft model: leave "
             "--speculative-algorithm {speculative.speculative_algorithm} out, or use NGRAM."),
        Rule(lambda c: c.model.is_embedding and c.parallel.pp_size > 1,
             "--is-embedding does not work across the stages of --pp-size: leave one of them out."),
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "context_length")
        if self.chat_template is not None and self.hf_chat_template_name is not None:
            raise ConfigError("--chat-template replaces the checkpoint's chat templates, and "
                              "--hf-chat-template-name names one: give one of the two.")
        at_least(self, 0, "base_gpu_id")
        at_least(self, 1, "gpu_id_step")
        if unnamed := [path for path in self.custom_weight_loader if not all(path.split(".")) or "." not in path]:
            raise ConfigError(f"--custom-weight-loader takes package.module.function, not {unnamed[0]}.")
        if self.model_checksum is not None and self.load_format == "dummy":
            raise ConfigError("--model-checksum compares what is loaded, and --load-format dummy loads nothing: leave "
                              "one of them out.")
        _ = self.config_overrides, self.loader_threads, self.seed_ports  # Raise for what they cannot read.
        if self.from_instance != (self.remote_instance_weight_loader_seed_instance_ip is not None):
            raise ConfigError("--load-format remote_instance and --remote-instance-weight-loader-seed-instance-ip go "
                              "together: give both, or neither.")
        if self.from_instance and not (self.remote_instance_weight_loader_seed_instance_service_port and
                                       self.seed_ports):
            raise ConfigError("--load-format remote_instance needs "
                              "--remote-instance-weight-loader-seed-instance-service-port and "
                              "--remote-instance-weight-loader-send-weights-group-ports.")
        if not -(2**63) <= self.random_seed < 2**63:
            raise ConfigError(f"--random-seed must fit into 64 bits, {self.random_seed} does not.")

    @property
    def from_instance(self) -> bool:
        """True where the weights are those of a running server."""
        return self.load_format == "remote_instance"

    @property
    def seed_ports(self) -> tuple[int, ...]:
        """The ports at which ranks of the running server send their weights; raises ConfigError."""
        name = "--remote-instance-weight-loader-send-weights-group-ports"
        try:
            found = json.loads(self.remote_instance_weight_loader_send_weights_group_ports or "[]")
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(type(port) is int and 0 < port < 65536 for port in found):
            raise ConfigError(f"{name} is a JSON list of ports, such as [29600, 29601].")
        return tuple(found)

    @property
    def config_overrides(self) -> dict[str, Any]:
        """The values that replace those of config.json; raises ConfigError."""
        return json_object("--json-model-override-args", self.json_model_override_args)

    @property
    def loader_threads(self) -> int:
        """Threads that read files of weights ahead, by --model-loader-extra-config; raises ConfigError."""
        return self._given_threads or 0

    @property
    def copy_threads(self) -> int:
        """Threads that copy tensors of a checkpoint to the model: as many as read files ahead, else a few."""
        given = self._given_threads
        return min(4, os.cpu_count() or 1) if given is None else given or 1

    @property
    def _given_threads(self) -> int | None:
        """The threads of --model-loader-extra-config, 0 where they are disabled, None where it does not say; raises
        ConfigError."""
        given = json_object("--model-loader-extra-config", self.model_loader_extra_config)
        if unknown := given.keys() - {"enable_multithread_load", "num_threads"}:
            raise ConfigError(f"--model-loader-extra-config has the settings enable_multithread_load and num_threads, "
                              f"not {', '.join(sorted(unknown))}.")
        enabled, threads = given.get("enable_multithread_load", False), given.get("num_threads", 8)
        if type(enabled) is not bool or type(threads) is not int or not 1 <= threads <= 256:
            raise ConfigError("--model-loader-extra-config takes true or false for enable_multithread_load, and 1 to "
                              "256 for num_threads.")
        return (threads if enabled else 0) if "enable_multithread_load" in given else None
