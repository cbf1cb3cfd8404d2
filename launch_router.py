"""``python -m baton.launch_router``, in place of ``python -m sglang_router.launch_router``."""

from .router.launch import main

if __name__ == "__main__":
    main()
