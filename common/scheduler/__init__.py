"""Parts of the batcher: queue orders, retraction and preemption, page budget and new-token ratio.

None of them does I/O or reads a clock, except ``host_pages`` and ``rates``: tensor-parallel ranks that are fed the
same calls take the same decisions.
"""
