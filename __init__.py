"""Baton: large language model serving with prefill and decode on separate servers."""

__version__ = "0.1.0"
