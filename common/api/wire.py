"""Numbers of request bodies, each within what carries it on: a message between processes, a tensor, a counter.

Without bounds JSON's numbers have no end: an integer of 65 bits breaks the message that it is put into, far behind the
door. BodyDecoder takes no type that holds an unbounded one.
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
    found: dict[str, None] = {}
    seen: set[type] = set()

    def visit(info: inspect.Type, where: str) -> None:
        if isinstance(info, (inspect.IntType, inspect.FloatType)):
            if (info.ge is None and info.gt is None) or (info.le is None and info.lt is None):
                found[where] = None
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
    return list(found)


def _inner(info: inspect.Type) -> list[inspect.Type]:
    """The types that a union or a collection is made of."""
    if isinstance(info, inspect.UnionType):
        return list(info.types)
    if isinstance(info, inspect.DictType):
        return [info.key_type, info.value_type]
    if isinstance(info, inspect.TupleType):
        return list(info.item_types)
    return [info.item_type] if isinstance(info, inspect.CollectionType) else []
