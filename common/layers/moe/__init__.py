"""Mixtures of experts: ``MoE`` is the layer; the other files are what it is made of."""

from .layer import MoE

__all__ = ["MoE"]
