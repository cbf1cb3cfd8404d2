"""The API server's side of the engine: client, channel, rank processes, multi-node, DP balancer. Torch-free."""
