"""Flags of ``bench_kvtransfer``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ...common.api.errors import ConfigError
from ...common.config.cli import flag
from ...common.config.server.disaggregation import TRANSFER_BACKENDS
from ...common.kvcache.layout import DTYPE_BYTES, KVLayout, split_layers
from ...common.registry import Choices


@dataclass(frozen=True)
class BenchArgs:
    """The defaults are the shape of Llama-3-8B and Qwen3-8B: 4,096 tokens are 512 MiB (Qwen3's 36 layers: 576 MiB)."""

    device: Literal["cpu", "cuda"] = flag("cpu", help="where the pages lie")
    prefill_gpu: tuple[int, ...] = flag((0,), help="GPUs of the senders, used in turn, with --device cuda")
    decode_gpu: tuple[int, ...] = flag((1,), help="GPUs of the receivers; may be the same")
    tp: tuple[str, ...] = flag(("1:1",), help="tensor-parallel sizes of prefill and decode, each a case")
    backend: str = flag("nixl", choices=Choices.of(TRANSFER_BACKENDS), help="transfer backend")
    prompt_tokens: tuple[int, ...] = flag((1024, 4096), help="prompt lengths")
    descriptor_kib: tuple[int, ...] = flag((64, 256, 1024, 2048), help=(
        "KiB of one page of one layer group, approximated by a whole number of groups"))
    order: Literal["both", "scattered", "contiguous"] = flag("both", help="how the pages lie in both pools")
    repeat: int = flag(10, help="timed transfers of each case, after one that is not timed")
    num_layers: int = flag(32, help="layers of the model")
    num_kv_heads: int = flag(8, help="KV heads of the model")
    head_dim: int = flag(128, help="elements of a head")
    page_size: tuple[int, ...] = flag((16,), help="tokens of a page")
    dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"] = flag("bfloat16", help=(
        "element type of the cache"))
    kv_checksum: Literal["sampled", "full", "off"] = flag("off", help="as the servers' flag")
    output: str | None = flag(None, help="write settings and figures to this JSON file")
    plot: str | None = flag(None, help="draw the figures into this SVG file")

    def __post_init__(self) -> None:
        if min(*self.prompt_tokens, *self.descriptor_kib, *self.page_size, self.repeat) < 1:
            raise ConfigError("Prompt lengths, descriptor sizes, page size and repetitions must be 1 or more.")
        for case in self.tp:
            if not re.fullmatch("[1-9][0-9]*:[1-9][0-9]*", case) or any(self.num_kv_heads % n for n in sizes_of(case)):
                raise ConfigError(f"--tp {case}: give two sizes as in 2:1, both dividing --num-kv-heads.")

    def layouts(self) -> Iterator[KVLayout]:
        """Yields layouts of all heads: one for each page size and each different number of layer groups that the
        descriptor sizes ask for, small pages first."""
        for page_size in self.page_size:
            layer_page = 2 * self.num_kv_heads * page_size * self.head_dim * DTYPE_BYTES[self.dtype]
            counts = sorted({round(self.num_layers * layer_page / (kib * 1024)) for kib in self.descriptor_kib})
            for groups in dict.fromkeys(split_layers(self.num_layers, layer_page, n) for n in reversed(counts)):
                yield KVLayout(groups, self.num_kv_heads, self.head_dim, page_size, self.dtype)

    @property
    def orders(self) -> tuple[str, ...]:
        return ("scattered", "contiguous") if self.order == "both" else (self.order,)


def sizes_of(case: str) -> tuple[int, int]:
    """Parses a case of ``--tp`` into the ranks of prefill and of decode."""
    prefill, decode = case.split(":")
    return int(prefill), int(decode)
