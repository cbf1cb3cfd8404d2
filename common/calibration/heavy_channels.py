"""``calibrate_double_sparsity``: orders the channels of each head by how heavy they are in a text.

As "Post-Training Sparse Attention with Double Sparsity" (Yang et al., arXiv:2408.07092) does: by the mean magnitude of
queries, of keys, and of the products of each token's query and its own key.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
import torch

from ..api.errors import ConfigError
from ..attention.channel_recorder import ChannelRecorder
from ..config.cli import parse
from ..distributed.parallel import Parallel
from ..engine.rank import join_groups
from ..engine.rank_spec import RankSpec
from ..forward.forward_batch import Row, build_forward_batch
from ..kvcache.channel_order import check_model
from ..kvcache.pool import KVPool
from ..models.registry import load_model_spec
from ..runner.attention_choice import AttentionChoice
from ..runner.kv_sizing import kv_layout, resolve_dtype
from ..runner.model_runner import ModelRunner
from ..runner.model_weights import ModelWeights
from ..tokenizer.tokenizer import load_tokenizer
from ..weights.loader import silent
from .channel_args import CalibrateDoubleSparsity


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command. Raises ConfigError."""
    run(parse(CalibrateDoubleSparsity, argv, prog="calibrate_double_sparsity", description=(
        "Order the channels of a model's heads by their magnitude in a text, for --ds-channel-config-path.")))


def run(config: CalibrateDoubleSparsity) -> None:
    """Writes the file of channels. Raises ConfigError."""
    args = config.calibration
    blocks = _blocks(config)
    try:
        with open(args.output_file, "a", encoding="utf-8"):  # known before the work
            pass
    except OSError as error:
        raise ConfigError(f"--output-file {args.output_file} cannot be written: {error}.") from None
    found = heavy_channels(config, blocks)
    with open(args.output_file, "w", encoding="utf-8") as file:
        json.dump(found, file)
    print(f"{args.output_file}: channels of {sum(map(len, blocks))} tokens in {len(blocks)} blocks", file=sys.stderr)


def _blocks(config: CalibrateDoubleSparsity) -> list[list[int]]:
    """Returns the token ids of the text's blocks."""
    args, model = config.calibration, config.model
    try:
        with open(args.text_file, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text-file {args.text_file} cannot be read: {error}.") from None
    tokenizer = load_tokenizer(model.tokenizer_path or model.model_path, model.revision,
                               trust_remote_code=model.trust_remote_code, download_dir=model.download_dir)
    ids: list[int] = []
    for line in text.splitlines(keepends=True):
        ids += tokenizer.encode(line, add_special_tokens=not ids)
        if len(ids) >= args.num_samples * args.block_size:
            break
    if not ids:
        raise ConfigError(f"--text-file {args.text_file} has no text: choose one with some thousand words.")
    return [ids[start:start + args.block_size] for start in range(0, len(ids), args.block_size)][:args.num_samples]


def heavy_channels(config: CalibrateDoubleSparsity, blocks: Sequence[Sequence[int]]) -> dict[str, list[list[int]]]:
    """Computes ``blocks`` of token ids, each a prompt, and returns the content of a file of channels; see
    ``ChannelOrder``. Raises ConfigError where the model has no such channels, or cannot be loaded."""
    server = config.server
    spec = load_model_spec(server.model)
    check_model(spec)
    longest = max(map(len, blocks))
    if longest > spec.context_length:
        raise ConfigError(f"--block-size {longest} must be {spec.context_length} or less, the model's context.")
    parallel = join_groups(RankSpec(server, 0, 1, "", "", ""))
    runner, recorder = _recording_runner(config, parallel, longest)
    pages = np.arange(runner.layout.pages_for(longest), dtype=np.int32)
    for block in blocks:
        runner.forward(build_forward_batch([Row(block, 0, pages)], runner.layout.page_size, parallel.device))
    return {f"model.layers.{layer}.self_attn.{kind}_proj": sums.argsort(dim=-1, descending=True, stable=True).tolist()
            for kind, of_layers in recorder.sums.items() for layer, sums in enumerate(of_layers.cpu())}


@torch.no_grad()
def _recording_runner(config: CalibrateDoubleSparsity, parallel: Parallel,
                      num_tokens: int) -> tuple[ModelRunner, ChannelRecorder]:
    """Loads the model, with a pool for one prompt of ``num_tokens``."""
    server, device = config.server, parallel.device
    spec = load_model_spec(server.model)
    dtype = resolve_dtype(server, spec, device)
    choice = AttentionChoice(server, spec, parallel, dtype)
    choice.check(device)
    weights = ModelWeights.load(server, spec, parallel, dtype, device, silent)
    layout = kv_layout(server.cache, spec, 1, dtype)
    pool = KVPool(layout, layout.pages_for(num_tokens) + 1, device)
    recorder = ChannelRecorder(choice.over([pool]), pool, spec.num_heads)
    return ModelRunner(server, weights, [pool], recorder, device, parallel), recorder
