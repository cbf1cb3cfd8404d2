"""Layers whose memory of a sequence is a recurrent state: causal convolutions, gated delta rule, Mamba-2."""
