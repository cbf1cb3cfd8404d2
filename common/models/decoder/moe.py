"""MLPs of models with mixtures of experts."""

from __future__ import annotations

from ...config.model import ModelSpec
from ...distributed.expert_parallel import ExpertParallel
from ...distributed.tp import TPGroup
from ...layers.moe import MoE
from ...weights.slots import Allocate
from .blocks import LayerMLP, MakeMLP, dense_mlp


def mixed_mlp(share: ExpertParallel, make_dense: MakeMLP | None = None) -> MakeMLP:
    """Returns a factory that builds an MoE layer for the layers that ``spec.moe`` names, for the others a dense MLP by
    ``make_dense``."""
    dense = make_dense or dense_mlp()

    def make(name: str, index: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate) -> LayerMLP:
        if spec.moe is None or index not in spec.moe.layers:
            return dense(name, index, spec, TPGroup(device=tp.device) if share.whole_dense else tp, allocate)
        return MoE(name, spec.moe, spec.hidden_size, share, allocate)

    return make
