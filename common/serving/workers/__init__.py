"""One server of several API server processes (``--tokenizer-worker-num N``): a main process, and N workers that accept
on one port.

    clients ── SO_REUSEPORT ──▶ worker 1 ┐ link (socket pair, msgpack):     ┌ EngineClient ── ZMQ ── engine ranks
                                worker 2 ┼ requests, outputs, server state ─┤ sessions, stored answers, files, batches
                                …        ┘ HTTP over a Unix socket          └ commands, metrics of all, health

A worker checks, tokenizes, detokenizes and streams the requests that need nothing but the engine: to it the main
process is the engine (``broker.py``). The client of the main process holds the requests of all workers as if they were
its own, so that pauses, aborts, limits, request ids and data-parallel balancing are what they are with one process.
Every other endpoint has state: workers forward it to the main process, whose state they show (``state.py``); an answer
that changed it leaves once all workers have the new one.

A worker that dies loses its own requests, which the engine drops, and another one starts. Workers die with the main
process, however that ends.
"""
