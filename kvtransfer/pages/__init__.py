"""Pages of other servers' host memory: each rank serves those of its own, and reads those of its peers' (the KV storage
``peers``)."""
