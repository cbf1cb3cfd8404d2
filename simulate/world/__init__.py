"""The simulated world: a virtual clock, engines, their transfers, the router."""
