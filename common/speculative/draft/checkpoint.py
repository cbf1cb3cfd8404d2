"""A draft model's checkpoint: its specification, whether it fits the model, and what of its weights it has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...api.errors import ConfigError
from ...attention.base import AttentionPlanner
from ...attention.mla.select import select_latent_attention
from ...attention.select import select_attention
from ...config.checkpoint import read_json, resolve_metadata
from ...config.draft_model import draft_args, flat_config, naming_draft
from ...config.model import ModelSpec
from ...config.server import ModelArgs, ServerConfig
from ...distributed.parallel import Parallel
from ...kvcache.layout import KVLayout
from ...kvcache.pool import KVPool
from ...models.drafts.network import DraftHead
from ...models.registry import load_model_spec
from ...weights.kv_scales import KV_DTYPES
from ...weights.lazy import LazyTensor, WithRows
from ...weights.loader import TensorParts
from ...weights.slots import Allocate, allocator
from ...weights.source import open_weights
from ..base import DraftContext


@dataclass(frozen=True)
class DraftCheckpoint:
    """A checkpoint of ``args``, whose config.json has ``values``. ``spec`` has the model's context length and number of
    tokens; the checkpoint's own ``vocab_size`` may differ by padding, which ``parts`` evens out."""

    args: ModelArgs
    values: dict[str, Any]
    spec: ModelSpec
    vocab_size: int

    @classmethod
    def of_flags(cls, context: DraftContext) -> DraftCheckpoint:
        """Reads the checkpoint of --speculative-draft-model-path; raises ConfigError where its vocabulary is not the
        model's, or where the ranks cannot split it or the device not compute it."""
        args = draft_args(context.config)
        with naming_draft():
            values = flat_config(read_json(resolve_metadata(args) / "config.json") or {})
            spec = load_model_spec(args, draft=True)
            spec.check_tp(context.parallel.attn_tp.size)
            if spec.quantization is not None:
                spec.quantization.check_device(context.dtype, context.device)
        model = context.spec
        if min(spec.vocab_size, model.vocab_size) < _num_tokens(context.config, max(spec.vocab_size, model.vocab_size)):
            raise ConfigError(f"The draft model {args.model_path} has a vocabulary of {spec.vocab_size} tokens, and "
                              f"{context.config.model.model_path} one of {model.vocab_size}: use a draft model of the "
                              "same tokenizer.")
        changed = dataclasses.replace(spec, context_length=model.context_length, vocab_size=model.vocab_size)
        return cls(args, values, changed, spec.vocab_size)

    def check_hidden_size(self, context: DraftContext, size: int) -> None:
        """Raises ConfigError where the model's hidden size is not ``size``, for which the draft model was made."""
        if size != context.spec.hidden_size:
            raise ConfigError(f"The draft model {self.args.model_path} is for a model of hidden size {size}, and "
                              f"{context.config.model.model_path} has {context.spec.hidden_size}: use a draft model "
                              "that was trained for it.")

    def parts(self, parts: TensorParts | None) -> TensorParts | None:
        """Returns the ``parts`` of its tensors, of which tables of its own vocabulary have a row for each of the
        model's tokens: further ones are left out, missing ones zeros."""
        return parts if self.vocab_size == self.spec.vocab_size else partial(_even_tables, self, parts)

    def narrowed(self, head: DraftHead) -> DraftHead:
        """Returns a head without the columns of the model's tokens that the checkpoint lacks."""
        if head.token_ids is not None or self.vocab_size >= head.table.vocab_size:
            return head
        return DraftHead(head.table.first(self.vocab_size))

    def tensor_names(self, parts: TensorParts | None) -> set[str]:
        """Returns the names of the checkpoint's tensors, as ``parts`` give them; none of dummy weights."""
        with naming_draft():
            source = open_weights(self.args)
            return {own for name, tensor, _ in source.tensors([])
                    for own, _ in (((name, tensor),) if parts is None else parts(name, tensor))}

    @property
    def is_dummy(self) -> bool:
        return self.args.load_format == "dummy"


def _even_tables(checkpoint: DraftCheckpoint, parts: TensorParts | None, name: str,
                 tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    """Gives tables of ``checkpoint``'s vocabulary the model's number of rows; see DraftCheckpoint.parts."""
    for own, part in ((name, tensor),) if parts is None else parts(name, tensor):
        is_table = own.endswith(("embed_tokens.weight", "lm_head.weight"))
        if is_table and part.get_shape()[0] == checkpoint.vocab_size:
            part = WithRows(part, checkpoint.spec.vocab_size)
        yield own, part


def _num_tokens(config: ServerConfig, default: int) -> int:
    """Returns how many tokens the model's tokenizer.json has; ``default`` without one."""
    vocabulary = _vocabulary(resolve_metadata(config.model))
    return max(vocabulary.values()) + 1 if vocabulary else default


def local_parallel(parallel: Parallel) -> Parallel:
    """Returns the groups of a draft model: it is split over the ranks of one attention group, its experts too, so that
    idle data-parallel ranks need not take part."""
    return Parallel(parallel.attn_tp)


def draft_layout(config: ServerConfig, spec: ModelSpec, tp_size: int, dtype: str) -> KVLayout:
    """Returns the layout of a draft model's pool on one rank: a single layer group, since all layers are computed
    before any travels. ``dtype`` is the model's."""
    cache_dtype = config.speculative.draft_cache_dtype(config.cache.kv_cache_dtype)
    return KVLayout(groups=(spec.num_layers,), num_kv_heads=spec.local_kv_heads(tp_size), head_dim=spec.kv_dim,
                    page_size=config.cache.page_size, dtype=KV_DTYPES.get(cache_dtype, dtype),
                    form="heads" if spec.mla is None else "latent", windows=spec.windows)


def draft_allocator(context: DraftContext, spec: ModelSpec) -> Allocate:
    """Returns the allocator of a draft model's parameters, in the model's type."""
    return allocator(getattr(torch, context.dtype), context.device, spec.quantization)


def draft_attention(context: DraftContext, spec: ModelSpec, pool: KVPool) -> AttentionPlanner:
    """Creates the attention backend of a draft model of ``spec``, which its own flag or the model's choose. Raises
    ConfigError where it cannot run."""
    kernels, heads = context.config.kernels, spec.num_heads // context.parallel.attn_tp.size
    backend = context.config.speculative.speculative_draft_attention_backend
    if backend is not None:
        kernels = dataclasses.replace(kernels, attention_backend=backend, decode_attention_backend=backend)
    with naming_draft() if backend is not None else nullcontext():
        if spec.mla is not None:
            return select_latent_attention(kernels, context.device, pool, spec.mla, heads, context.dtype)
        return select_attention(kernels, context.device, pool, heads, context.dtype,
                                spec.windows_of(range(spec.num_layers)), spec.scores)


def check_tokenizer(config: ServerConfig, args: ModelArgs) -> None:
    """Raises ConfigError where the draft's tokenizer and the model's give tokens other ids; folders without a
    tokenizer.json are not compared."""
    with naming_draft():
        draft = _vocabulary(resolve_metadata(args))
    model = _vocabulary(resolve_metadata(config.model))
    if draft and model and (differing := sum(model.get(token) != id for token, id in draft.items())):
        raise ConfigError(f"The draft model {args.model_path} has another tokenizer than {config.model.model_path}: "
                          f"{differing} of its {len(draft)} tokens have another id there.")


def _vocabulary(folder: Path) -> dict[str, int]:
    content = read_json(folder / "tokenizer.json") or {}
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # of unigram models: pairs of a token and its score
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}


def read_token_map(path: str, vocab_size: int) -> torch.Tensor:
    """Reads the ids [n] int64, ascending, of --speculative-token-map: a tensor or list in a .pt file, a list of a
    .json file, or a text file with an id in each word. Raises ConfigError."""
    try:
        ids = sorted(set(_READERS.get(Path(path).suffix, _text_ids)(Path(path))))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"Cannot read --speculative-token-map {path}: {error}.") from None
    except Exception as error:  # torch's own errors of unpickling
        raise ConfigError(f"Cannot read --speculative-token-map {path}: {type(error).__name__}.") from None
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ConfigError(f"--speculative-token-map {path} must have ids from 0 to {vocab_size - 1}, those of the "
                          "model's tokens.")
    return torch.tensor(ids, dtype=torch.int64)


def _torch_ids(path: Path) -> list[int]:
    return [int(id) for id in torch.load(path, map_location="cpu", weights_only=True)]


def _json_ids(path: Path) -> list[int]:
    return [int(id) for id in json.loads(path.read_text(encoding="utf-8"))]


def _text_ids(path: Path) -> list[int]:
    return [int(word) for word in path.read_text(encoding="utf-8").split()]


_READERS: dict[str, Callable[[Path], list[int]]] = {".pt": _torch_ids, ".pth": _torch_ids, ".json": _json_ids}
