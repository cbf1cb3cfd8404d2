"""The chain steps to capture: how many drafts, of how many requests."""

from __future__ import annotations

from ...config.server import ServerConfig

_MAX_ROWS = 2048
_MAX_ADAPTIVE_ROWS = 1024
"""A step of more rows is bound by arithmetic, and has fewer drafts. On an H200 256 requests of an 8B model are fastest
with 3 drafts each."""
_LEVELS = (1, 2, 3, 5)


def default_sizes(largest: int) -> list[int]:
    """Returns few sizes, up to ``largest``: a size of each number of drafts has three graphs, which take 0.4 s."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, *range(160, largest + 1, 32)]
    return sorted({size for size in sizes if size < largest} | {largest})


def chain_sizes(config: ServerConfig) -> dict[int, list[int]]:
    """Returns the sizes, in requests, of each number of drafts of which ``config`` lets chain steps be captured."""
    args = config.speculative
    if (not args.is_device or args.topk > 1 or not config.role.decodes or config.dp_size > 1
            or config.parallel.pp_size > 1 or not config.captures_graphs
            or args.speculative_attention_mode == "prefill"):
        return {}
    levels, most_rows = [args.num_drafts], _MAX_ROWS
    if args.speculative_adaptive:
        # Steps without drafts: a drafter that reads hidden states stores its keys and values while it has these.
        plain = [0] if args.is_shifted else []
        levels = [*plain, *(level for level in _LEVELS if level < args.num_drafts), args.num_drafts]
        most_rows = _MAX_ADAPTIVE_ROWS
    largest = config.largest_captured
    requested = [size for size in config.kernels.cuda_graph_bs if size <= largest]
    found = {}
    for level in levels:
        most = min(largest, max(1, most_rows // (level + 1))) if level else largest
        found[level] = sorted(size for size in requested if size <= most) or default_sizes(most)
    return found


def most_chain_rows(config: ServerConfig) -> int:
    """Returns the rows of the largest chain step that is captured; 0 where none is."""
    return max((sizes[-1] * (count + 1) for count, sizes in chain_sizes(config).items()), default=0)
