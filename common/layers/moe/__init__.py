"""Mixtures of experts: ``MoE`` is the layer."""

from .layer import MoE

__all__ = ["MoE"]
