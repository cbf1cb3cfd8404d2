"""The small kernels of chain steps: microseconds a call, in a CUDA graph of many.

    python -m baton.tests.bench.chain_kernels [--batches 1,16,64,256] [--num-drafts 3]

Place and accept are to cost up to 5 us each for one request. The samplers are of one draft of 32,000 tokens; the joined
norms are a draft layer's input, and beside them the four launches in whose place they are.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from ...common.api.sampling import SamplingParams
from ...common.sampling.chain_draft_sampling import ChainDraftSampling
from ...kernels.arguments import ChainPages, ChainState, KnownChains, NormWeight
from ...kernels.rowwise.gather_rows import gather_rows
from ...kernels.rowwise.joined_norms import joined_norms
from ...kernels.rowwise.rmsnorm import rmsnorm
from ...kernels.speculative.accept_chains import accept_chains
from ...kernels.speculative.place_chains import place_chains, place_rows
from .device_time import captured, run_seconds

_CALLS, _HIDDEN, _VOCAB, _PAGES = 64, 4096, 32_000, 200


def calls(requests: int, num_drafts: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls of each kernel for a step of ``requests``."""
    width = num_drafts + 1
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * _PAGES
    indices = torch.arange(requests * _PAGES, dtype=torch.int32, device=device)
    pages = ChainPages(indptr, indices, 16, requests * _PAGES, 16 * _PAGES)
    state = ChainState.empty(requests, num_drafts, device)
    state.positions[:], state.num_drafts[:] = 2048, num_drafts
    sources = torch.arange(requests, device=device)
    known = KnownChains(torch.zeros_like(sources), sources.new_zeros(requests, width), torch.zeros_like(sources))
    limits = torch.full_like(sources, 16 * _PAGES)
    placed = place_chains(state, sources, known, limits, pages)
    samples = torch.zeros_like(placed.rows.input_ids)
    accepted = accept_chains(samples, placed, state, pages, num_drafts)
    sampling = ChainDraftSampling(requests, device)
    sampling.update([SamplingParams(seed=1, temperature=0.7, top_p=0.95)] * requests)
    logits = torch.randn(requests, _VOCAB, device=device).bfloat16()
    token_ids, drafts = torch.arange(_VOCAB, device=device), state.tokens[:, 1]
    table = torch.randn(_VOCAB, _HIDDEN, device=device).bfloat16()
    hidden, norm = table[:requests].clone(), NormWeight(table[0].clone(), 1e-5)

    def apart() -> torch.Tensor:
        return torch.cat([rmsnorm(gather_rows(table, sources), *norm)[0], rmsnorm(hidden, *norm)[0]], -1)

    return {
        "place_chains": lambda: place_chains(state, sources, known, limits, pages),
        "place_rows": lambda: place_rows(placed.rows.starts, accepted.sequences, pages),
        "accept_chains": lambda: accept_chains(samples, placed, state, pages, num_drafts),
        "a greedy draft": lambda: sampling(requests, True)(logits, limits, drafts, token_ids),
        "a sampled draft": lambda: sampling(requests, False)(logits, limits, drafts, token_ids),
        "joined_norms": lambda: joined_norms(table, hidden, norm, norm, sources),
        "joined_norms, apart": apart,
    }


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    """Returns as many calls as one graph has."""
    def run() -> None:
        for _ in range(_CALLS):
            call()

    return run


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--num-drafts", type=int, default=3)
    args = parser.parse_args()
    print("| kernel | requests | us |\n|---|---|---|")
    for requests in map(int, args.batches.split(",")):
        for name, call in calls(requests, args.num_drafts, torch.device("cuda")).items():
            seconds = statistics.median(run_seconds(captured(repeated(call)), 9)[2:]) / _CALLS
            print(f"| {name} | {requests} | {seconds * 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
