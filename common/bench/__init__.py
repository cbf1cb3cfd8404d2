"""The ``bench_`` commands: workloads, a load client, figures and their reports.

``bench_serving`` measures a server over HTTP, ``bench_offline_throughput`` an engine without one, ``bench_one_batch``
the steps of a model alone. Only the last needs torch in its own process.
"""
