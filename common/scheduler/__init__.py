"""Scheduling of one rank: batcher, request queues, policies, page budget, preemption, request tracker.

None of them does I/O or reads a clock, except ``preemption/host_kv_cache.py`` and ``preemption/copy_rates.py``:
tensor-parallel ranks that are fed the same calls take the same decisions.
"""
