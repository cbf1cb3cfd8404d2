"""Engine state of a request, and the batches that steps compute: Req, Chunk, ScheduledBatch, InputBatch."""
