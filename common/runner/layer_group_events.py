"""Events at the ends of layer groups in a forward pass: after one, a group's pages may be transferred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ..forward.forward_batch import AfterGroup
from ..kvcache.layout import KVLayout


class LayerGroupEvents:
    """Records events for pools of these layouts, one for each cache group. Layer groups are numbered one cache group
    after the other."""

    def __init__(self, layouts: Sequence[KVLayout], device: torch.device):
        first = min(layout.number_of(0) for layout in layouts)
        last_layers = [layout.number_of(end - 1) - first for layout in layouts for end in accumulate(layout.groups)]
        self._group_of_last_layer = {layer: group for group, layer in enumerate(last_layers)}
        self._device = device

    def after_layer(self, after_group: AfterGroup | None) -> Callable[[int], None]:
        """Returns the callback for a model to call after each layer; it calls ``after_group`` after a group's last one.
        """
        def after_layer(layer: int) -> None:
            group = self._group_of_last_layer.get(layer)
            if group is None or after_group is None:
                return
            event = None
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
            after_group(group, event)

        return after_layer
