"""What the batcher is composed of: the order of those that wait, who gives way, and what is reserved for output.

One noun a file, none of which does I/O or reads a clock, but for ``host_pages`` and ``rates``: tensor-parallel ranks
that are fed the same calls take the same decisions.
"""
