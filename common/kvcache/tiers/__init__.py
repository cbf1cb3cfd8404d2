"""KV tiers: copies of pages outside the device's pool. One file a tier, registered in ``KV_TIERS`` by its name."""
