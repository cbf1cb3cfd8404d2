"""Lets Triton's interpreter do once in a process what it does at each call of a function: a pytest plugin.

For each kernel and each function that a kernel calls, the interpreter (3.6) replaces hundreds of functions of
``triton.language``, and it computes types of the same few shapes again and again: a third of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_type_of = core._type_for_tuple_values
_numpy_type_of_element = cache(interpreter._get_np_dtype)
_patched: set[frozenset[int]] = set()


class _Kept:
    """Functions that stay replaced: the process only interprets."""

    def restore(self) -> None:
        pass


def _patch_once(function: Callable[..., Any]) -> _Kept:
    modules = frozenset(id(value) for value in function.__globals__.values()
                        if value is core or value is interpreter.tl)
    if modules not in _patched:
        _patched.add(modules)
        _patch(function)
    return _Kept()


@cache
def _type_of_ints(values: tuple[int, ...]) -> core.tuple_type:
    return _type_of(values)


def _type_of_values(values: Sequence[Any], fields: Sequence[str] | None = None) -> core.tuple_type:
    if fields is None and all(type(value) is int for value in values):
        return _type_of_ints(tuple(values))
    return _type_of(values, fields)


def _numpy_type(triton_type: core.dtype) -> np.dtype:
    element = triton_type.element_ty if isinstance(triton_type, core.block_type) else triton_type
    return np.dtype(np.uint64) if isinstance(element, core.pointer_type) else _numpy_type_of_element(element)


interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _numpy_type
core._type_for_tuple_values = _type_of_values
