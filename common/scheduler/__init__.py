"""Scheduling of one rank: batcher, request queues, policies, page budget, preemption, request tracker.

None of them does I/O or reads a clock, except ``preemption/copy_rates.py`` and the KV tiers that it calls:
tensor-parallel ranks that are fed the same calls take the same decisions.
"""
