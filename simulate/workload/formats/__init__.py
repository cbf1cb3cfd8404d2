"""Formats of traces, one a file, each registered by its name."""
