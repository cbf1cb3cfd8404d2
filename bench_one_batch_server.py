"""``python -m baton.bench_one_batch_server``, in place of ``python -m sglang.bench_one_batch_server``."""

from .bench import bench_one_batch_server

if __name__ == "__main__":
    bench_one_batch_server()
