"""Write policies: when pages of the prefix cache are copied to its tier. One file each, in ``WRITE_POLICIES``."""
