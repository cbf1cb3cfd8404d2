"""JSON schemas for tests of structured output: some by hand, many drawn with a fixed seed.

All of them describe short values (a small model may else say one word for ever), and use only what a grammar enforces.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

TEXT = {"type": "string", "maxLength": 12}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def _object(required: list[str] | None = None, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties,
            "required": list(properties) if required is None else required, "additionalProperties": False}


BY_HAND: dict[str, Schema] = {
    "flat": _object(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}, member={"type": "boolean"}),
    "nested": _object(a=_object(b=_object(c=_object(d=_object(e=DIGIT))))),
    "optional": _object([], a=DIGIT, b={"type": "boolean"}, c={"type": "null"}),
    "optional between required": _object(["a", "d"], a=DIGIT, b=DIGIT, c=DIGIT, d=DIGIT),
    "array of objects": {"type": "array", "items": _object(x=DIGIT, y=DIGIT), "minItems": 1, "maxItems": 3},
    "exact array": {"type": "array", "items": DIGIT, "minItems": 4, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "matrix": {"type": "array", "minItems": 2, "maxItems": 2,
               "items": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 2}},
    "tuple": {"type": "array", "prefixItems": [DIGIT, TEXT, {"type": "boolean"}], "items": False, "minItems": 3},
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of everything": {"enum": [1, "one", None, True, 1.5, [1, "a"], {"k": []}]},
    "const": {"const": "only this"},
    "const object": _object(kind={"const": "circle"}, radius=DIGIT),
    "const with quotes": {"const": 'a "quoted" back\\slash\nand a line'},
    "anyOf": {"anyOf": [DIGIT, TEXT, {"type": "null"}]},
    "anyOf objects": {"anyOf": [_object(cat=DIGIT), _object(dog={"type": "boolean"})]},
    "oneOf by a tag": {"oneOf": [_object(kind={"const": "a"}, x=DIGIT), _object(kind={"const": "b"}, y=TEXT)]},
    "allOf of one": {"allOf": [_object(a=DIGIT)]},
    "types in a list": {"type": ["boolean", "null"]},
    "ref": {"$defs": {"point": _object(x=DIGIT, y=DIGIT)}, "type": "object",
            "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
            "required": ["from", "to"], "additionalProperties": False},
    "definitions": {"definitions": {"p": {"type": "boolean"}}, **_object(a={"$ref": "#/definitions/p"})},
    "ref of ref": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": DIGIT}, **_object(v={"$ref": "#/$defs/a"})},
    "recursive tree": {"$defs": {"node": _object(["value"], value=DIGIT, children={
        "type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1})}, "$ref": "#/$defs/node"},
    "recursive list": {"$defs": {"list": _object(["head"], head={"type": "boolean"}, tail={"$ref": "#/$defs/list"})},
                       "$ref": "#/$defs/list"},
    "date": _object(day={"type": "string", "format": "date"}),
    "date-time": _object(at={"type": "string", "format": "date-time"}),
    "time": _object(at={"type": "string", "format": "time"}),
    "uuid": _object(id={"type": "string", "format": "uuid"}),
    "phone pattern": _object(phone={"type": "string", "pattern": r"^\+[0-9]{2} [0-9]{3}-[0-9]{4}$"}),
    "alternatives pattern": _object(code={"type": "string", "pattern": "^(AB|CD|EF)[0-9]{1,3}$"}),
    "class pattern": _object(word={"type": "string", "pattern": "^[a-zA-Z_]{1,8}$"}),
    "unicode names": _object(**{"größe": DIGIT, "名前": TEXT, "emoji 😀": {"type": "boolean"}}),
    "unicode values": {"enum": ["Grüße", "日本", "😀😀", "naïve"]},
    "unicode const": _object(city={"const": "Zürich – São Paulo"}),
    "names to escape": _object(**{'a"b': DIGIT, "c\\d": DIGIT, "e\tf": DIGIT}),
    "length in characters": _object(s={"type": "string", "minLength": 3, "maxLength": 5}),
    "negative": _object(t={"type": "integer", "minimum": -40, "maximum": -3}),
    "across zero": _object(t={"type": "integer", "minimum": -7, "maximum": 12}),
    "exclusive": _object(t={"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}),
    "one integer": {"type": "integer", "minimum": 42, "maximum": 42},
    "large integers": {"type": "integer", "minimum": 999_998, "maximum": 1_000_003},
    "number between": _object(p={"type": "number", "minimum": 0, "maximum": 1}),
    "map": {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,5}$"}, "additionalProperties": {"type": "boolean"},
            "maxProperties": 2},
    "declared and more": {"type": "object", "properties": {"id": DIGIT}, "required": ["id"],
                          "additionalProperties": False},
    "pattern properties": {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT}, "maxProperties": 2,
                           "additionalProperties": False},
    "title and description": {"title": "T", "description": "d", **_object(a={"title": "A", "default": 3, **DIGIT})},
    "boolean schema": _object(a={"type": "boolean"}, b={"enum": [False]}),
    "null": {"type": "null"},
    "person": _object(
        ["name", "tags"], name=TEXT, tags={"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
        email={"anyOf": [{"type": "string", "pattern": "^[a-z]{2,5}@x\\.org$"}, {"type": "null"}]}),
}


class _Drawer:
    """Draws schemas; ``depth`` is how deep a value may still nest."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def draw(self, depth: int) -> Schema:
        leaves = [self._integer, self._number, self._string, self._pattern, self._enum, self._const, self._simple]
        inner = [self._object, self._object, self._array, self._tuple, self._any_of, self._referring]
        return self._random.choice(leaves if depth == 0 else leaves + inner + inner)(depth)

    def _integer(self, depth: int) -> Schema:
        low = self._random.randint(-1000, 1000)
        name = self._random.choice(("minimum", "exclusiveMinimum"))
        return {"type": "integer", name: low, "maximum": low + self._random.choice((1, 2, 9, 77, 1000))}

    def _number(self, depth: int) -> Schema:
        low = self._random.choice((-2, 0, 0.5, 1, 3.25))
        return {"type": "number", "minimum": low, "maximum": low + self._random.choice((0.25, 1, 2.5))}

    def _string(self, depth: int) -> Schema:
        shortest = self._random.randint(0, 4)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + self._random.randint(0, 8)}

    def _pattern(self, depth: int) -> Schema:
        return {"type": "string", "pattern": self._random.choice((
            "^[0-9]{5}$", "^[A-Z]{2,3}-[0-9]{1,4}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$", "^[a-z]{1,6}$",
            "^v[0-9]\\.[0-9]{1,2}$", "^[x-z]{2,4}$"))}

    def _enum(self, depth: int) -> Schema:
        words = ["alpha", "beta", "gamma", "delta", "über", "東京", 1, 2.5, None, False]
        return {"enum": self._random.sample(words, self._random.randint(1, 5))}

    def _const(self, depth: int) -> Schema:
        return {"const": self._random.choice(("x", "two words", 7, -1.5, True, None, ["l", 1], {"k": "v"}))}

    def _simple(self, depth: int) -> Schema:
        return {"type": self._random.choice(("boolean", "null", ["boolean", "null"]))}

    def _object(self, depth: int) -> Schema:
        names = ["id", "name", "größe", "is_ok", "list", "x-y", "Z", "9"]
        names = self._random.sample(names, self._random.randint(1, 4))
        properties = {name: self.draw(depth - 1) for name in names}
        required = [name for name in names if self._random.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        fewest = self._random.randint(0, 2)
        return {"type": "array", "items": self.draw(depth - 1), "minItems": fewest,
                "maxItems": fewest + self._random.randint(0, 2)}

    def _tuple(self, depth: int) -> Schema:
        items = [self.draw(depth - 1) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.draw(depth - 1) for _ in range(self._random.randint(1, 3))]}

    def _referring(self, depth: int) -> Schema:
        """References are to the root's definitions, which ``generated`` adds."""
        return {"$ref": f"#/$defs/{self._random.choice(('word', 'flag', 'pair'))}"}


_SHARED = {"word": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "flag": {"type": "boolean"},
           "pair": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "minItems": 2, "maxItems": 2}}


def generated(count: int, seed: int = 2026) -> dict[str, Schema]:
    """``count`` schemas, by name; the same for the same seed."""
    drawer = _Drawer(seed)
    found = {}
    for i in range(count):
        schema = drawer.draw(depth=i % 4)
        found[f"drawn {i}"] = {"$defs": _SHARED, **(_object(v=schema) if "$ref" in schema else schema)}
    return found


CORPUS = BY_HAND | generated(170)
