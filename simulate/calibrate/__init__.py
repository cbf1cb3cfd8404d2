"""``bench_calibrate``: measures a server over HTTP and fits a cost table."""
