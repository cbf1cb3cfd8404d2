"""One router of several processes (``--router-workers N``): a parent, and N children that accept on one port.

    clients ── SO_REUSEPORT ──▶ child 0 ┐               ┌ loads, admission, policies' counters: one column a child
                                child 1 ┼ shared memory ┼ ring buffers: prompts that each child sent, by worker
                                …       ┘               └ rates and API keys, under a lock
                                  │ link (socket pair, msgpack)
                                parent: membership, health checks, discovery, circuits, sums of metrics

A decision reads what it needs (loads, prompts sent, free concurrency) from shared memory at the moment it is made.
A child writes its own column only, so nothing waits for a lock except where an exact limit is near. What changes
seldom (workers, their health, their circuits) belongs to the parent: children report what they saw, it sends all
children the new state, and an administrator's change is answered once all of them have applied it.

The parent serves no client and relays no request, so the death of any child loses that child's requests and nothing
else: its column is cleared, and another one starts. The children die with the parent, however that ends.
"""
