"""``python -m baton.launch_server``, in place of ``python -m sglang.launch_server``."""

from .launch import launch_server

if __name__ == "__main__":
    launch_server()
