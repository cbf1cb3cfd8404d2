"""Flags of weights that stay in host memory and are streamed to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...api.errors import ConfigError
from ..cli import flag
from ..rules import Rule, ServerRule, at_least, check_own_rules

_GIB = 1 << 30


@dataclass(frozen=True)
class OffloadArgs:
    cpu_offload_gb: float = flag(0.0, help=(
        "GiB of host memory of each rank for the weights of some layers, spread evenly over the model, which are "
        "copied to the GPU in every step: for models that do not fit, at the speed of PCIe"))
    offload_group_size: int = flag(-1, help=(
        "choose the layers in host memory by groups of so many, instead of by --cpu-offload-gb; -1: no groups"))
    offload_num_in_group: int = flag(1, help="last layers of each group of --offload-group-size in host memory")
    offload_prefetch_step: int = flag(1, help=(
        "layers in host memory that are copied ahead of the one that computes; the GPU has a buffer for each of them "
        "and one more"))

    own_flag_rules: ClassVar[tuple[Rule[OffloadArgs], ...]] = (
        Rule(lambda c: c.offload_group_size != -1 and c.offload_group_size < 1,
             "--offload-group-size must be -1 or 1 or more, not {offload_group_size}."),
        Rule(lambda c: c.cpu_offload_gb and c.offload_group_size > 0,
             "--cpu-offload-gb and --offload-group-size each choose the layers in host memory: give one of them."),
        Rule(lambda c: c.offload_group_size > 0 and c.offload_num_in_group > c.offload_group_size,
             "--offload-num-in-group {offload_num_in_group} must be {offload_group_size} or less, the size of a group "
             "(--offload-group-size)."),
        Rule(lambda c: c.offload_group_size == -1 and c.offload_num_in_group != 1,
             "--offload-num-in-group needs groups: set --offload-group-size too."),
        Rule(lambda c: not c.enabled and c.offload_prefetch_step != 1,
             "--offload-prefetch-step needs layers in host memory: set --cpu-offload-gb or --offload-group-size too."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.offload.enabled and c.model.model_impl == "transformers",
             "--cpu-offload-gb and --offload-group-size stream Baton's own layers: leave --model-impl transformers "
             "out."),
        Rule(lambda c: c.offload.enabled and c.parallel.enable_eplb,
             "--enable-eplb moves experts between GPUs, and --cpu-offload-gb and --offload-group-size keep them in "
             "host memory: leave one of them out."),
    )

    def __post_init__(self) -> None:
        at_least(self, 0, "cpu_offload_gb")
        at_least(self, 1, "offload_num_in_group", "offload_prefetch_step")
        check_own_rules(self)

    @property
    def enabled(self) -> bool:
        """True if some layers' weights are to stay in host memory."""
        return self.cpu_offload_gb > 0 or self.offload_group_size > 0

    @property
    def num_buffers(self) -> int:
        """Buffers on the device through which the layers pass."""
        return self.offload_prefetch_step + 1

    def choose(self, sizes: Sequence[int]) -> list[int]:
        """Returns the layers in host memory, of layers of ``sizes`` bytes on this rank; raises ConfigError where that
        would save no memory of the device."""
        size, last = self.offload_group_size, self.offload_num_in_group
        if size > 0:
            flags, chosen = "--offload-group-size", [i for i in range(len(sizes)) if i % size >= size - last]
        else:
            flags, chosen = "--cpu-offload-gb", _spread(sizes, int(self.cpu_offload_gb * _GIB))
        if len(chosen) <= self.num_buffers:
            raise ConfigError(
                f"{flags} puts {len(chosen)} of {len(sizes)} layers into host memory, of up to "
                f"{max(sizes, default=0) / _GIB:.3g} GiB each, and the {self.num_buffers} buffers of "
                "--offload-prefetch-step take as much of the device: put more layers there.")
        return chosen


def _spread(sizes: Sequence[int], num_bytes: int) -> list[int]:
    """Returns as many layers as fit, at equal distances: the copy of each has the others between them to hide in."""
    for count in range(len(sizes), 0, -1):
        chosen = [-(-(i + 1) * len(sizes) // count) - 1 for i in range(count)]
        if sum(sizes[index] for index in chosen) <= num_bytes:
            return chosen
    return []
