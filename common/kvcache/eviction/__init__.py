"""Eviction policies: the order in which pages leave a cache. One file each, registered in ``EVICTION_POLICIES``."""
