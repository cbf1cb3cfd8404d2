"""``python -m baton.bench_offline_throughput``, in place of ``python -m sglang.bench_offline_throughput``."""

from .bench import bench_offline_throughput

if __name__ == "__main__":
    bench_offline_throughput()
