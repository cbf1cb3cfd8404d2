"""``python -m baton.bench_one_batch``, in place of ``python -m sglang.bench_one_batch``."""

from .bench import bench_one_batch

if __name__ == "__main__":
    bench_one_batch()
