"""``python -m baton.launch_decode``, the console script's name."""

from .decode.launch import main

if __name__ == "__main__":
    main()
