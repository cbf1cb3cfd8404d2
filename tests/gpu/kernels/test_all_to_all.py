"""All-to-all dispatch and combine with all ranks on the available GPUs, each on a stream of its own; see
test_all_reduce.py. With two GPUs the ranks alternate between them, so that rows cross the link."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.kernels import reference
from baton.kernels.arguments import Float8Rows, Scales
from baton.kernels.comm.all_to_all import all_to_all_combine, all_to_all_dispatch, reduce_combined
from baton.kernels.comm.dispatch_buffers import GROUP, DispatchLayout, DispatchMemory
from baton.kernels.moe.moe_experts import moe_experts, moe_products
from baton.kernels.tuning.all_to_all import CopyLaunch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MAX_POLLS = 1 << 20
PLACES, CHOICES = 16, 8
FEW = CopyLaunch(16, 8192, 16)
"""A launch with few programs, since those of all ranks must be resident at once."""


class Ranks:
    def __init__(self, counts: list[int], width: int, *, float8: bool, gpus: int):
        self.counts, self.most, self.width = counts, max(counts), width
        self.devices = [torch.device("cuda", rank % gpus) for rank in range(len(counts))]
        for device in range(1, gpus):  # a copy lets either GPU see the other's memory
            for to, source in ((0, device), (device, 0)):
                torch.zeros(1, device=f"cuda:{to}").copy_(torch.zeros(1, device=f"cuda:{source}"))
        layout = DispatchLayout(len(counts), self.most + 3, width, CHOICES, float8)
        buffers = [torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for device in self.devices]
        self.peers = [DispatchMemory(rank, layout, own, torch.tensor([each.data_ptr() for each in buffers],
                                                               device=own.device)) for rank, own in enumerate(buffers)]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        for device, stream in zip(self.devices, self.streams):  # what is asked of the driver may wait for kernels
            with torch.cuda.device(device), torch.cuda.stream(stream):
                kept = [torch.empty(4 << 20, dtype=torch.uint8, device=device) for _ in range(16)]
                del kept
        generator = torch.Generator().manual_seed(width)
        every = len(counts) * PLACES
        self.rows = [torch.randn(count, width, generator=generator).bfloat16().to(device)
                     for count, device in zip(counts, self.devices)]
        self.numbers = [torch.rand(count, every, generator=generator).topk(CHOICES).indices.to(device)
                        for count, device in zip(counts, self.devices)]
        self.weights = [torch.rand(count, CHOICES, generator=generator).to(device)
                        for count, device in zip(counts, self.devices)]
        self.made = [torch.randn(len(counts) * self.most * CHOICES, width, generator=generator).bfloat16().to(device)
                     for device in self.devices]
        self.synchronize()

    def synchronize(self) -> None:
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def run(self, work: Callable[[int], object]) -> None:
        """``work(rank)`` on every rank's stream at once; waits for all."""
        for rank, (device, stream) in enumerate(zip(self.devices, self.streams)):
            with torch.cuda.device(device), torch.cuda.stream(stream):
                work(rank)
        self.synchronize()

    def exchange(self, rank: int, max_polls: int = MAX_POLLS) -> tuple[torch.Tensor, ...]:
        peers, most = self.peers[rank], self.most
        all_to_all_dispatch(self.rows[rank], self.numbers[rank], self.weights[rank], most, PLACES, peers,
                            max_polls=max_polls, launch=FEW)
        tokens, (places, _) = peers.tokens(most), peers.choices(most)
        came = (places.clone(), *((tokens.values.clone(), tokens.scale.clone()) if isinstance(tokens, Float8Rows)
                                  else (tokens.clone(),)))
        all_to_all_combine(self.made[rank], None, most, PLACES, peers, max_polls=max_polls, launch=FEW)
        return (reduce_combined(self.numbers[rank], PLACES, peers)[0], *came)


def made(counts: list[int], width: int, float8: bool, gpus: int) -> Ranks:
    """Kernels are loaded first: loading may wait for running kernels, which would wait for the others."""
    warm = Ranks(counts, width, float8=float8, gpus=gpus)
    for rank in range(len(counts)):
        with torch.cuda.device(warm.devices[rank]):
            warm.exchange(rank, 2)
        warm.synchronize()
    return Ranks(counts, width, float8=float8, gpus=gpus)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("counts,width", [([300, 300], 2048), ([65, 0, 1, 17], 7168), ([1, 1], 2880)])
def test_tokens_go_to_their_experts_and_come_back(counts, width, float8, gpus):
    """Nine exchanges in a row: no rank waits for another in between."""
    if gpus > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    ranks = made(counts, width, float8, gpus)
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in counts]
    ranks.run(lambda rank: found[rank].extend(ranks.exchange(rank) for _ in range(9)))
    rows, numbers = [own.cpu() for own in ranks.rows], [own.cpu() for own in ranks.numbers]
    weights = torch.cat([torch.nn.functional.pad(own.cpu(), (0, 0, 0, ranks.most - len(own)))
                         for own in ranks.weights])
    parts = []
    for rank, own in enumerate(found):
        wanted, ids = reference.all_to_all_dispatch(rows, numbers, ranks.most, PLACES, rank)
        some = (ids >= 0).any(1)
        for _, places, *tokens in own:
            assert torch.equal(places.cpu(), ids)
            if float8:
                values, scale = reference.quantize_groups(wanted[some], GROUP)
                back = tokens[0].cpu()[some].float() * tokens[1].cpu()[some].repeat_interleave(GROUP, 1)[:, :width]
                assert torch.allclose(tokens[1].cpu()[some], scale, rtol=1e-6)
                assert torch.allclose(back, values.float() * scale.repeat_interleave(GROUP, 1)[:, :width], rtol=0.13)
            else:
                assert torch.equal(tokens[0].cpu()[some], wanted[some])
        parts.append(reference.all_to_all_combine(ranks.made[rank].cpu(), None, ids, weights, PLACES)
                     .view(len(counts), ranks.most, width))
    for rank, own in enumerate(found):
        whole = reference.all_reduce([part[rank, :counts[rank]] for part in parts])
        for total, *_ in own:
            assert torch.allclose(total.cpu().float(), whole.float(), atol=3e-2, rtol=2e-2)
    assert not any(peers.view(0, 64, dtype=torch.int32).any() for peers in ranks.peers), "counters are zeros again"


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("counts", [[5, 3], [1500, 900]])
def test_experts_compute_what_comes_where_it_lies(counts, float8):
    """The result is that of one rank with all experts; with float8 block scales, rows are sent in float8."""
    hidden, size, experts = 512, 256, 2 * PLACES
    ranks = made(counts, hidden, float8, 1)
    gate_up, down = (torch.randn(experts, *shape, device="cuda") * 0.05
                     for shape in ((2 * size, hidden), (hidden, size)))
    scales = None
    if float8:
        gate_up, down = ((16 * matrix).to(torch.float8_e4m3fn) for matrix in (gate_up, down))
        scales = Scales(*(torch.rand(experts, *shape, device="cuda") / 16 for shape in ((4, 4), (4, 2))), "block")
    else:
        gate_up, down = gate_up.bfloat16(), down.bfloat16()
    ranks.synchronize()
    ranks.run(lambda rank: all_to_all_dispatch(ranks.rows[rank], ranks.numbers[rank], ranks.weights[rank], ranks.most,
                                               PLACES, ranks.peers[rank], max_polls=MAX_POLLS, launch=FEW))
    products = []
    for rank, peers in enumerate(ranks.peers):  # kernels are compiled, which no rank may wait for
        held = slice(rank * PLACES, (rank + 1) * PLACES)
        part = None if scales is None else Scales(scales.gate_up[held], scales.down[held], "block")
        products.append(moe_products(peers.tokens(ranks.most), gate_up[held], down[held], peers.choices(ranks.most)[0],
                                     part))
    ranks.synchronize()
    ranks.run(lambda rank: all_to_all_combine(*products[rank], ranks.most, PLACES, ranks.peers[rank],
                                              max_polls=MAX_POLLS, launch=FEW))
    for rank, peers in enumerate(ranks.peers):
        found = reduce_combined(ranks.numbers[rank], PLACES, peers)[0].float()
        wanted = moe_experts(ranks.rows[rank], gate_up, down, ranks.numbers[rank], ranks.weights[rank], scales).float()
        assert (found - wanted).norm() <= 0.01 * wanted.norm()


def test_a_graph_holds_an_exchange():
    ranks = made([40, 33], 2048, False, 1)
    graphs, results = [], []
    for rank, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append([ranks.exchange(rank)[0] for _ in range(3)])
        graphs.append(graph)
    torch.cuda.synchronize()
    for phase in range(4):
        for own in ranks.made:
            own.fill_(phase)
        torch.cuda.synchronize()
        ranks.run(lambda rank: graphs[rank].replay())
        for rank, own in enumerate(results):
            wanted = phase * ranks.weights[rank].sum(1, keepdim=True).expand(-1, 2048)
            assert all(torch.allclose(total.float(), wanted, atol=3e-2, rtol=2e-2) for total in own)
