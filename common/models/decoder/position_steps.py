"""What is done with a layer's queries and keys by their positions, see ``PositionStep``."""

from __future__ import annotations

import torch

from ....kernels.reference.attention import rotate


def rotate_before_norms(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor | None,
                        positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Applies rope itself, so that attention norms what is rotated (Hunyuan)."""
    assert cos_sin is not None
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    return rotate(q, cos, sin), rotate(k, cos, sin), None


class NormsOrTemperature:
    """Norms heads of queries and keys with ``eps``, without weights, where rope follows; their squares have the same
    mean before and after it. Where none follows, multiplies the query at position p by
    ``1 + scale * log(1 + floor((p + 1) / floor_scale))`` (Llama 4; arXiv:2501.19399)."""

    def __init__(self, eps: float | None, scale: float, floor_scale: int):
        self._eps = eps
        self._scale, self._floor_scale = scale, floor_scale

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor | None,
                 positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if cos_sin is not None:
            return (q, k, cos_sin) if self._eps is None else (self._normed(q), self._normed(k), cos_sin)
        if self._floor_scale:
            steps = torch.log1p(torch.floor((positions.float() + 1) / self._floor_scale))
            q = (q * (steps * self._scale + 1)[:, None, None]).to(q.dtype)
        return q, k, None

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self._eps).to(x.dtype)
