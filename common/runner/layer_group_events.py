"""Events at the ends of layer groups in a forward pass: after one, a group's pages may be transferred. And waits at
their beginnings, for pages that are being loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ..forward.forward_batch import AfterGroup
from ..kvcache.layout import KVLayout
from ..kvcache.tiers.base import PageLoad


class LayerGroupEvents:
    """Records events for pools of these layouts, one for each cache group. Layer groups are numbered one cache group
    after the other."""

    def __init__(self, layouts: Sequence[KVLayout], device: torch.device):
        first = min(layout.number_of(0) for layout in layouts)
        last_layers = [layout.number_of(end - 1) - first for layout in layouts for end in accumulate(layout.groups)]
        self._groups_to: dict[int, list[int]] = {}
        for group, layer in enumerate(last_layers):
            self._groups_to.setdefault(layer, []).append(group)
        self._groups_from: dict[int, list[int]] = {}
        first_layers = [layout.number_of(end - size) - first for layout in layouts
                        for end, size in zip(accumulate(layout.groups), layout.groups)]
        for group, layer in enumerate(first_layers):
            self._groups_from.setdefault(layer, []).append(group)
        self._last_layer = max(last_layers)
        self._device = device

    def after_layer(self, after_group: AfterGroup | None, loads: Sequence[PageLoad] = ()) -> Callable[[int], None]:
        """Returns the callback for a model to call after each layer; it calls ``after_group`` after a group's last one.
        Before a group's first layer the current stream waits for its pages of ``loads``, after the model's last one for
        all that is left of them, which is a draft model's. The waits for the first layer are made at once."""
        self._wait(loads, 0)

        def after_layer(layer: int) -> None:
            if loads:
                self._wait(loads, layer + 1)
            groups = self._groups_to.get(layer)
            if groups is None or after_group is None:
                return
            event = None
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
            for group in groups:
                after_group(group, event)

        return after_layer

    def _wait(self, loads: Sequence[PageLoad], layer: int) -> None:
        for load in loads:
            for group in self._groups_from.get(layer, ()):
                load.wait_on_device(group)
            if layer > self._last_layer:
                load.wait_on_device()
