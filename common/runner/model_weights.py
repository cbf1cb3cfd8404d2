"""One rank's model, and the checkpoints that its weights are loaded from."""

from __future__ import annotations

import dataclasses

import torch

from ..api.errors import ConfigError
from ..api.identity import ModelIdentity
from ..config.checkpoint import read_config
from ..config.load_format import LOAD_FORMATS
from ..config.model import ModelSpec
from ..config.quantization import unpacking
from ..config.server import ModelArgs, ServerConfig
from ..distributed.parallel import Parallel
from ..models.decoder.causal_lm import CausalLM
from ..models.registry import build_model, load_model_spec, tensor_parts
from ..weights.fingerprint import identify
from ..weights.kv_scales import Scales
from ..weights.loader import Progress, check_weights, is_redundant, load_weights, silent
from ..weights.source import open_weights
from ..weights.staging import Destination
from .kv_sizing import kv_scales, scales_of
from .remote_instance import load_from_instance


class ModelWeights:
    """Owns ``model``, built for ``spec``, with weights of the checkpoint ``identity``. ``load`` builds it and loads its
    first weights; ``update`` overwrites them with another checkpoint's, at the same addresses."""

    def __init__(self, config: ServerConfig, spec: ModelSpec, model: CausalLM, parallel: Parallel):
        self.spec = spec
        self.model = model
        self.identity: ModelIdentity = identify(config.model, spec)
        self._config = config
        self._checkpoint = self.identity
        self._layers = parallel.pp.layers(spec.num_layers)
        self._on_other_stage = parallel.pp.on_other_stage(spec.num_layers)
        self._unpack = unpacking(read_config(config.model) or {}, config.model.quantization)

    @classmethod
    def load(cls, config: ServerConfig, spec: ModelSpec, parallel: Parallel, dtype: str, device: torch.device,
             progress: Progress) -> ModelWeights:
        """Builds the model and loads its weights. Raises ConfigError where the checkpoint does not fit the model, or
        the memory."""
        try:
            offloading = dataclasses.replace(spec, offload=config.offload)
            weights = cls(config, spec, build_model(offloading, parallel, getattr(torch, dtype), device), parallel)
            if config.kernels.enable_fp32_lm_head and weights.model.lm_head is not None:
                weights.model.lm_head.in_float32 = True
            if config.model.from_instance:
                weights._receive(parallel, device)
            else:
                weights._read(config.model, progress)
        except torch.OutOfMemoryError:
            raise ConfigError(f"The model's weights do not fit on {device}: use more GPUs with --tp-size, a "
                              f"smaller --dtype than {dtype}, or host memory with --cpu-offload-gb.") from None
        return weights

    def check(self, args: ModelArgs, current_scales: Scales) -> None:
        """Raises ConfigError where ``update`` could not load this checkpoint; changes nothing. ``current_scales``:
        those of the rank's KV cache."""
        spec = load_model_spec(args)
        stated, current = spec.facts(), self.spec.facts()
        differing = [name for name in {**stated, **current} if stated.get(name) != current.get(name)
                     and name not in ("dtype", "eos_token_ids", "dropped_eos_ids")]
        if differing:
            raise ConfigError(f"{args.model_path} is another model than the one that runs: {', '.join(differing)} "
                              "differ.")
        if scales_of(kv_scales(self._config.cache, args, spec), self._layers) != current_scales:
            raise ConfigError(f"{args.model_path} has other scales for a KV cache in float8 than those that run, which "
                              "peers know: start servers with it, or give all --quantization-param-path.")
        check_weights(open_weights(args), self.model.slots(), parts=tensor_parts(spec))

    @torch.no_grad()
    def update(self, args: ModelArgs) -> None:
        """Loads another checkpoint, which ``check`` accepted, over the weights. No step is in flight."""
        self._read(args, silent)
        self.identity = self._checkpoint = identify(args, self.spec, self.identity.updates + 1)
        self._unpack = unpacking(read_config(args) or {}, args.quantization)

    def destination(self) -> Destination:
        """Returns what takes weights that a trainer sends."""
        return Destination(self.model.slots, self._ignores, tensor_parts(self.spec), self._unpack)

    def pushed(self, digest: str) -> None:
        """Records that tensors were copied over the checkpoint's, in this update or before; ``digest`` is theirs."""
        self.identity = self._checkpoint.updated(digest, self.identity.updates + 1)

    def _ignores(self, name: str) -> bool:
        """Returns whether a checkpoint's tensor of this name belongs to no parameter here, and may be sent."""
        return (is_redundant(name, self.spec.tie_word_embeddings) or name.startswith(self.spec.unused_names)
                or self._on_other_stage(name))

    def args_of(self, model_path: str, revision: str | None, load_format: str) -> ModelArgs:
        """Returns the flags of the server with another checkpoint."""
        return dataclasses.replace(self._config.model, model_path=model_path, revision=revision,
                                   load_format=load_format, model_fingerprint=None)

    @torch.no_grad()
    def _receive(self, parallel: Parallel, device: torch.device) -> None:
        manifest = load_from_instance(self._config, self.model.slots(), parallel.world, device)
        fingerprint = self._config.model.model_fingerprint or manifest.identity.fingerprint
        self.identity = self._checkpoint = ModelIdentity(fingerprint, manifest.identity.source,
                                                         version=manifest.weight_version)

    def _read(self, args: ModelArgs, progress: Progress) -> None:
        load_weights(open_weights(args), self.model.slots(), progress, tied=self.spec.tie_word_embeddings,
                     unused=self.spec.unused_names, on_other_stage=self._on_other_stage,
                     parts=tensor_parts(self.spec),
                     num_threads=args.copy_threads if LOAD_FORMATS.get(args.load_format).reads_checkpoint else 1)
