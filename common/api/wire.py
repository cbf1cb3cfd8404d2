"""Bounded numbers of request bodies, which fit the messages between processes, tensors and counters that take them.

JSON's numbers are unbounded: an integer of 65 bits would break the message that it is put into, far from the place
where the body is checked. BodyDecoder refuses types with unbounded numbers.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, inspect

_LARGEST_FLOAT32 = 3.4028234663852886e38

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Float32 = Annotated[float, Meta(ge=-_LARGEST_FLOAT32, le=_LARGEST_FLOAT32)]


def unbounded_fields(kind: Any) -> list[str]:
    """Struct fields, ``Struct.field``, whose integers or floats have no lower or no upper bound."""
    fields: dict[str, None] = {}
    seen: set[type] = set()

    def visit(info: inspect.Type, where: str) -> None:
        if isinstance(info, (inspect.IntType, inspect.FloatType)):
            if (info.ge is None and info.gt is None) or (info.le is None and info.lt is None):
                fields[where] = None
        elif isinstance(info, inspect.StructType):
            if info.cls in seen:
                return
            seen.add(info.cls)
            for field in info.fields:
                visit(field.type, f"{info.cls.__name__}.{field.encode_name}")
        else:
            for inner in _inner(info):
                visit(inner, where)

    visit(msgspec.inspect.type_info(kind), getattr(kind, "__name__", str(kind)))
    return list(fields)


def _inner(info: inspect.Type) -> list[inspect.Type]:
    """The element types of a union or a collection."""
    if isinstance(info, inspect.UnionType):
        return list(info.types)
    if isinstance(info, inspect.DictType):
        return [info.key_type, info.value_type]
    if isinstance(info, inspect.TupleType):
        return list(info.item_types)
    return [info.item_type] if isinstance(info, inspect.CollectionType) else []
