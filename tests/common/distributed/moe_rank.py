"""One rank of test_moe_ranks.py: ``moe_rank.py RANK SIZE INIT_METHOD OUT CHECKPOINTS [DEVICE]``; writes what it
computed to OUT. CHECKPOINTS holds one folder a model family; DEVICE is place_of's."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.common.config.moe import MoESpec
from baton.common.config.server import KernelArgs, ParallelArgs, ServerConfig
from baton.common.distributed.deferred_reduce import DeferredRows
from baton.common.distributed.expert_parallel import AllToAll, ExpertParallel
from baton.common.distributed.low_latency import GatheredTokens
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup, init_tp
from baton.common.layers.moe import MoE
from baton.common.runner.eplb import ExpertCounts, ExpertUtilization
from baton.common.weights.slots import allocator
from baton.tests.helpers.dummy_weights import fill_dummy
from baton.tests.helpers.rank_processes import end_rank, place_of
from baton.tests.helpers.replayed_prompts import record_again
from baton.tests.helpers.small_models import forward, load_runner, scattered_pages, server_config

SPREAD = MoESpec(num_experts=8, top_k=3, intermediate_size=12, layers=(0,), scoring="sigmoid", num_groups=4,
                 top_groups=2, group_score="top2", correction_bias=True, scaling_factor=2.5, shared_size=20)
HIDDEN = 16
TOKENS = np.random.default_rng(2).integers(0, 97, 30)


def main(rank: int, size: int, init_method: str, out: str, checkpoints: str, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    place, backend = place_of(rank, device)
    world = init_tp(rank, size, init_method, place, timeout=120, backend=backend)
    shares = {f"ep{ep}": ExpertParallel(world, ep) for ep in (1, 2, 4) if ep <= size}
    shares["alltoall"] = ExpertParallel(world, size, "alltoall")
    logits = {}
    folders = sorted(Path(checkpoints).iterdir())
    for folder in folders:
        for name, share in shares.items():
            logits[folder.name, name] = model_logits(folder, Parallel(world, experts=share))
    balanced = {"none": while_experts_move(folders[0], world, "none"),
                "alltoall": while_experts_move(folders[-1], world, "alltoall")}
    torch.save({"logits": logits, "spread": spread(world), "apart": apart(world),
                "balanced": balanced, "variants": variants(folders[-1], world)}, out)
    end_rank(world)


def model_logits(folder: Path, parallel: Parallel) -> torch.Tensor:
    """Of 29 tokens at once and one decode step."""
    runner = load_runner(config_of(folder, ParallelArgs(tp_size=parallel.tp.size), parallel.device), parallel,
                         parallel.device)
    pages = scattered_pages(runner, 1, 30)[0]
    first = forward(runner, [(TOKENS[:29], 0, pages)])
    if parallel.experts.a2a == "none" and parallel.device.type == "cpu":
        replayed = record_again(runner, [40])
        torch.testing.assert_close(forward(runner, [(TOKENS[:29], 0, pages)]), first, atol=1e-5, rtol=1e-5)
        assert set(replayed) == {40}
    return torch.cat((first, forward(runner, [(TOKENS[29:], 29, pages)]))).cpu()


def config_of(folder: Path, args: ParallelArgs, device: torch.device) -> ServerConfig:
    """On GPUs by our kernels, single decode steps as CUDA graphs."""
    kernels = KernelArgs(attention_backend="triton" if device.type == "cuda" else "torch", cuda_graph_bs=(1,))
    return dataclasses.replace(server_config(folder, tp=args.tp_size, dtype="float32"), parallel=args, kernels=kernels)


def variants(folder: Path, world: TPGroup) -> dict:
    """The same by other flags of the balancing."""
    mapped = json.dumps({"physical_to_logical_map": [np.resize(np.roll(np.arange(8), shift), 8 + world.size).tolist()
                                                     for shift in (1, 3)]})
    first = json.loads((folder / "config.json").read_text()).get("first_k_dense_replace", 0)
    counted = json.dumps({"layers": [first, first + 1], "logical_count": [[[1, 2, 3, 4, 5, 6, 7, 80], [80, *[1] * 7]]]})
    flags: dict[str, dict[str, Any]] = {
        "static": {"moe_a2a_backend": "alltoall", "ep_dispatch_algorithm": "static",
                   "expert_distribution_recorder_mode": "per_pass"},
        "chunks": {"eplb_rebalance_layers_per_chunk": 1, "eplb_rebalance_num_iterations": 4,
                   "eplb_algorithm": "deepseek_vec"},
        "threshold": {"eplb_min_rebalancing_utilization_threshold": 0.01},
        "mapped": {"init_expert_location": mapped, "eplb_rebalance_num_iterations": 1000},
        "counted": {"init_expert_location": counted, "eplb_rebalance_num_iterations": 1000},
        "last steps": {"moe_a2a_backend": "alltoall", "expert_distribution_recorder_buffer_size": 4},
        "fake": {"ep_dispatch_algorithm": "fake", "eplb_rebalance_num_iterations": 1000},
    }
    return {name: while_experts_move(folder, world, "none", **each) for name, each in flags.items()}


def while_experts_move(folder: Path, world: TPGroup, a2a: AllToAll, **flags: Any) -> dict:
    """20 tokens at once and 10 decode steps, in which experts move four times; then the weights are loaded anew."""
    args = ParallelArgs(**{"moe_a2a_backend": a2a, "eplb_rebalance_num_iterations": 3, "tp_size": world.size,
                           "ep_size": world.size, "enable_eplb": True, "ep_num_redundant_experts": world.size} | flags)
    runner = load_runner(config_of(folder, args, world.device),
                         Parallel(world, experts=ExpertParallel.from_args(args, world)),
                         world.device)
    layers = list(ExpertCounts(runner._model).layers.values())
    pages = scattered_pages(runner, 1, 30)[0]
    placements, logits, utilization = [], [], ExpertUtilization(ExpertCounts(runner._model), 5)
    runner.expert_record.start()
    for start, stop in [(0, 20), *((i, i + 1) for i in range(20, 30))]:
        utilization.count_step()
        made = forward(runner, [(TOKENS[start:stop], start, pages)])
        logits.append(made.cpu())  # a graph's logits are overwritten by the next
        placements.append([layer.placement.physical_to_logical.tolist() for layer in layers])
    said = runner.expert_record.stop()
    passes = None
    if args.expert_distribution_recorder_mode == "per_pass":
        with tempfile.TemporaryDirectory() as own:
            passes = torch.load(runner.expert_record.dump(own), weights_only=True)
    runner.update_weights(str(folder), None)
    again = forward(runner, [(TOKENS, 0, pages)]).cpu()
    counts = ExpertCounts(runner._model).totals().tolist()
    return {"logits": torch.cat(logits), "again": again, "placements": placements, "said": said, "counts": counts,
            "passes": passes, "gauges": utilization.gauges}


def layer(share: ExpertParallel) -> MoE:
    """Random, by its tensors' names: the same experts however they are shared."""
    made = MoE("mixture", SPREAD, HIDDEN, share, allocator(torch.float32, torch.device("cpu")))
    fill_dummy(made.slots(), 5)
    made.router.weight *= 50  # as drawn, all experts score alike
    return made


def local_tokens(rank: int) -> torch.Tensor:
    """Unequal counts, and none at all on rank 1."""
    return torch.randn(0 if rank == 1 else 3 * rank + 2, HIDDEN, generator=torch.Generator().manual_seed(rank))


@torch.inference_mode()
def spread(world: TPGroup) -> torch.Tensor:
    """What the layer makes of tokens that only this rank has."""
    return layer(ExpertParallel(world, world.size, "alltoall")).forward_all_to_all(local_tokens(world.rank))


@torch.inference_mode()
def apart(world: TPGroup) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """The same where every rank is an attention group; of two tokens of each rank, which all ranks have; and how many
    choices were counted. All that before experts move and after."""
    share = ExpertParallel(world, world.size, "peer", redundant=world.size, eplb=True, counts_tokens=True)
    parallel = Parallel(world, TPGroup(), world, share)
    made, mine = layer(parallel.experts), local_tokens(world.rank)
    found = []
    for _ in range(2):
        rows = parallel.token_exchange.step(world.gather_ints(np.array([len(mine)]))[:, 0].tolist())
        sent = made.forward_deferred(mine, rows)
        rows = parallel.token_exchange.step([2] * world.size, all_decode=True)
        met = made.forward_deferred(GatheredTokens(world.all_gather_rows(two_tokens(world.rank))), rows)
        assert isinstance(sent, torch.Tensor) and isinstance(met, DeferredRows)
        counts = world.all_reduce(made.counts.clone())
        found.append((sent, met.reduce(), int(counts.sum())))
        moved = world.all_reduce(torch.tensor(made.rebalance(np.arange(8.0)[None] ** 2)))
        assert len(found) == 2 or moved > 0
    return found


def two_tokens(rank: int) -> torch.Tensor:
    return torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(100 + rank))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
