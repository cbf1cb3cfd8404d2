"""``python -m baton.launch_cluster``, in place of ``python -m sglang_router.launch_server``."""

from .launch import launch_cluster

if __name__ == "__main__":
    launch_cluster()
