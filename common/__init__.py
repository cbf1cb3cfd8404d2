"""The code that all parts of Baton share. Importing any of it first checks that the modules around it are Baton's."""

import os
import sys


def _check_neighbours() -> None:
    """A registry's unrelated package ``baton`` may be installed over our ``__init__.py`` or next to it."""
    ours = hasattr(sys.modules[__name__.rpartition(".")[0]], "_DISTRIBUTION")
    if ours and not os.path.isdir(os.path.join(os.path.dirname(os.path.dirname(__file__)), "_baton")):
        return
    sentence = ("An unrelated package that is also called baton is installed over this one: pip uninstall baton "
                "baton-serve, then install Baton again from its source folder or its wheel.")
    if os.path.basename(sys.argv[0]).startswith(("launch_", "bench_")):
        raise SystemExit(f"error: {sentence}")
    raise ImportError(sentence)


_check_neighbours()
