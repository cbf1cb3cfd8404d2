"""``python -m baton.bench_serving``, in place of ``python -m sglang.bench_serving``."""

from .bench import bench_serving

if __name__ == "__main__":
    bench_serving()
