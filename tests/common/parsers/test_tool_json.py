"""JSON that arrives in pieces, against Python's own parser of whole texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.common.parsers.json_scanner import JsonScanner

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8)


def scanned(text: str, cuts: list[int]) -> int | None:
    """Where the value ends, None where it does not."""
    scanner, pos, seen = JsonScanner(), 0, ""
    for start, end in zip([0, *cuts], [*cuts, len(text)]):
        seen += text[start:end]
        pos = scanner.feed(seen, pos)
    return pos if scanner.done else None


def read(text: str) -> int | None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        return json.JSONDecoder(parse_constant=refuse).raw_decode(text)[1]
    except ValueError:
        return None


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_values_end_where_python_says(data: st.DataObject) -> None:
    text = json.dumps({"a": data.draw(VALUES)}, ensure_ascii=data.draw(st.booleans()))
    at = data.draw(st.integers(1, len(text)))
    text = text[:at] + data.draw(st.text('{}[]",:\\u0123456789-+.eEtrufalsn \n\t', max_size=4)) + text[
        at + data.draw(st.integers(0, 3)):]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert scanned(text, cuts) == read(text)


@settings(max_examples=200, deadline=None)
@given(st.text('{}[]",:\\u01-.e tfn\x00é٣', max_size=12))
@example('"a": 01}')
@example('"\\ud800": [1e5, -0, 1.]}')
@example('"a": ٣}')
def test_noise_ends_where_python_says(noise: str) -> None:
    text = "{" + noise
    assert scanned(text, []) == scanned(text, list(range(len(text)))) == read(text)


@pytest.mark.parametrize(("text", "end"), [
    ('[]', 2), ('{}', 2), ('[ ] x', 3), ('[1, {"a": [true, null]}] x', 24), ('"a\\u00e9\\n" x', 11), ("-1.5e3 ", 6),
    ('{"a" : 1 , "b": "}"}', 20), ("[1", None), ("{", None), ('{"a"', None), ('{"a":', None), ("1", None),
    ("[,]", None), ("{a", None), ("{1: 2}", None), ('{"a" 1}', None), ("[1 2]", None), ('"\\x"', None),
    ('"\\u00g0"', None), ('"\n"', None), ("01 ", None), ("[}", None), ("[1,]", None), ('{"a": 1,}', None)])
def test_a_value_ends_at_its_last_character(text: str, end: int | None) -> None:
    assert scanned(text, []) == scanned(text, list(range(len(text)))) == end
