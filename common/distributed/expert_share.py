"""Which part of a layer's experts one rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..api.errors import ConfigError
from ..config.moe import MoESpec
from .tp import TPGroup

AllToAll = Literal["none", "alltoall"]


@dataclass(frozen=True)
class ExpertShare:
    """One rank's share. The ranks of ``group`` stand in ``ep_size`` rows of neighbours: a row holds an equal part of
    the experts, and each rank of a row an equal part of every such expert's intermediate values.

    ``a2a`` says how tokens reach the experts of other ranks: ``none`` computes every token on every rank that holds
    one of its experts, and adds the results up; ``alltoall`` sends each token to the ranks of its experts and back.
    ``apart``: every rank is an attention group of its own, with its own tokens.
    """

    group: TPGroup
    ep_size: int = 1
    a2a: AllToAll = "none"
    apart: bool = False

    @property
    def own_tokens(self) -> bool:
        """Whether a rank gives its layers its own tokens, in place of all tokens that there are."""
        return self.apart and self.a2a == "alltoall"

    @property
    def split(self) -> int:
        """Ranks that share each expert's intermediate values."""
        return self.group.size // self.ep_size

    @property
    def ep_rank(self) -> int:
        return self.group.rank // self.split

    @property
    def split_rank(self) -> int:
        return self.group.rank % self.split

    def check(self, spec: MoESpec | None) -> None:
        """Raises ConfigError where the experts (None: the model has none) cannot be shared so."""
        ep = self.ep_size
        assert self.group.size % ep == 0 and (self.a2a == "none" or ep == self.group.size)
        if spec is None:
            if ep > 1 or self.a2a != "none":
                raise ConfigError("--ep-size and --moe-a2a-backend are for mixtures of experts, which this model is "
                                  "not: leave them out.")
            return
        if spec.num_experts % ep:
            raise ConfigError(f"--ep-size {ep} must divide the model's {spec.num_experts} experts.")
        if spec.intermediate_size % self.split:
            raise ConfigError(f"{self.split} ranks cannot share an expert's intermediate size {spec.intermediate_size} "
                              f"evenly: raise --ep-size, or change --tp-size.")
