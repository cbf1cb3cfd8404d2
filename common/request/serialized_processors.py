"""Logit processors in SGLang's serialized form: JSON whose ``callable`` is the hexadecimal pickle of a class, which
dill or cloudpickle wrote.

Unpickling runs whatever its writer put into it, in the rank's process: call it only where the operator allows it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import pickle
from typing import Any

_STAND_INS = {"sglang.srt.sampling.custom_logit_processor": "baton.common.sampling.sglang_processors"}
"""Modules of SGLang that a pickle names, by ours with the same classes: servers need no SGLang."""


def is_serialized(processor: str) -> bool:
    """True for a serialized processor, False for an import path."""
    return processor.lstrip().startswith("{")


def serialized_name(processor: str) -> str:
    """A short name for errors; equal for equal processors only."""
    return f"serialized {hashlib.blake2b(processor.encode(), digest_size=8).hexdigest()}"


def serialize(processor: Any) -> str:
    """The serialized form of a class or a callable; raises ModuleNotFoundError where dill is not installed."""
    import dill

    return json.dumps({"callable": dill.dumps(processor).hex()})


def unpickle(processor: str) -> Any:
    """Returns what was serialized. Raises anything: the pickle is a program."""
    data = bytes.fromhex(json.loads(processor)["callable"])
    return _unpickler_class()(io.BytesIO(data)).load()


@functools.cache
def _unpickler_class() -> type[pickle.Unpickler]:
    """Without dill, what cloudpickle wrote can be read all the same."""
    base: Any = pickle.Unpickler
    try:
        import dill
    except ModuleNotFoundError:
        pass
    else:
        base = dill.Unpickler

    class Unpickler(base):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            if (ours := _STAND_INS.get(module)) and hasattr(importlib.import_module(ours), name):
                module = ours
            return super().find_class(module, name)

    return Unpickler
