"""``python -m baton.launch_prefill``, the console script's name."""

from .prefill.launch import main

if __name__ == "__main__":
    main()
