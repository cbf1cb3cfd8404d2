"""Events at the ends of layer groups in a forward pass: after one, a group's pages may be transferred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ..forward.forward_batch import AfterGroup


class LayerGroupEvents:
    """Records events for a pool with ``groups[g]`` layers in group g."""

    def __init__(self, groups: Sequence[int], device: torch.device):
        self._group_of_last_layer = {last - 1: group for group, last in enumerate(accumulate(groups))}
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
