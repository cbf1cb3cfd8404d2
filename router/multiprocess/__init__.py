"""One router of several processes (``--router-workers N``): a parent, and N children that accept on one port.

    clients ── SO_REUSEPORT ──▶ child 0 ┐                       ┌ loads, places, turns: one column a child
                                child 1 ┼── board (shared memory)┼ rings: what each child sent to whom
                                …       ┘                       └ rates and keys, under a lock
                                  │ link (socket pair, msgpack)
                                parent: membership, health checks, discovery, circuits, sums of metrics

What a decision needs (loads, who was sent what, who may run) is read from the board at the moment of the decision.
A child writes its own column only, so nothing waits for a lock except where an exact limit is near. What changes
seldom (workers, their health, their circuits) belongs to the parent: children tell it what they saw, it tells all
children what holds, and an administrator's change is answered once all of them know.

The parent serves no client and holds no request, so the death of any child loses that child's requests and nothing
else: its column is cleared, and another one starts. The children die with the parent, however that ends.
"""
