"""Answers in each format of tool calls, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.common.parsers.output_format import OutputFormat
from baton.common.parsers.output_parser import OutputDelta, ToolArgumentsDelta, ToolCallStart, joined
from baton.common.parsers.tools import JSON_ARRAY, TOOL_FORMATS

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "write": {"type": "object", "properties": {"text": {"type": "string"}, "to": {"type": ["string", "null"]}}},
    "plan": {"type": "object", "properties": {"steps": {"type": "array"}, "options": {"type": "object"},
                                              "fast": {"type": "boolean"}, "size": {"enum": ["s", "l"]}}},
    "now": {"type": "object", "properties": {}},
}


def call(name: str, arguments: str) -> list[OutputDelta]:
    return [ToolCallStart(name), ToolArgumentsDelta(arguments)]


def of_pieces(reading: OutputFormat, pieces: list[str]) -> list[OutputDelta]:
    reader = reading.new_parser()
    return joined([*(part for piece in pieces for part in reader.push(piece)), *reader.finish()])


@dataclass(frozen=True)
class Case:
    format: str
    text: str
    parts: list[OutputDelta] = field(hash=False)

    def reading(self) -> OutputFormat:
        return OutputFormat(JSON_ARRAY if self.format == "json" else TOOL_FORMATS.get(self.format), SCHEMAS)


def _hermes() -> list[Case]:
    def tag(inner: str) -> str:
        return f"<tool_call>\n{inner}\n</tool_call>"

    one = tag('{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "</tool_call>"}]}}')
    one_part = call("add", '{"a": 1, "b": [2, {"c": "</tool_call>"}]}')
    return [Case("hermes", text, parts) for text, parts in [
        ("Only words, 1 < 2 and <tool.", ["Only words, 1 < 2 and <tool."]),
        (one, one_part),
        (f"Let me see.\n\n{one}\nAnd so on. ", ["Let me see.", *one_part, "And so on. "]),
        (one + "\n" + tag('{"name": "now", "arguments": {}}'), [*one_part, *call("now", "{}")]),
        (tag('{"arguments": {"a": 2}, "name": "add"}'), call("add", '{"a": 2}')),
        (tag('{"name": "now"}'), call("now", "{}")),
        (tag('{"name": "now", "arguments": null}'), call("now", "{}")),
        (tag('{"name": "add", "arguments": "{\\"a\\": 5}"}'), call("add", '{"a": 5}')),
        (tag('{"name": "write", "arguments": {"text": "é 🙂 \\u00e9 \\"q\\" \\\\ \\n"}}'),
         call("write", '{"text": "é 🙂 \\u00e9 \\"q\\" \\\\ \\n"}')),
        (tag('{"name": "unknown", "arguments": {"a": 1}}') + " ok", ["ok"]),
        (tag('{"name": "add", "arguments": {"a": 1}}}}'), call("add", '{"a": 1}')),
        (tag('{"name": "add", "arguments": {"a": }}') + "x", [*call("add", '{"a": }}'), "x"]),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 12', call("add", '{"a": 12')),
        ('<tool_call>{"name": "write", "arguments": {"text": "open}}</tool_call> so ' + one,
         [*call("write", '{"text": "open}}'), "so", *one_part]),
        (tag('{"name": "write", "arguments": {"text": "open') + " and no end",
         [*call("write", '{"text": "open'), "and no end"]),
        (tag('{"name": "write", "arguments": {"text": "a </tool_call> b"}}') + "x",
         [*call("write", '{"text": "a </tool_call> b"}'), "x"]),
        (tag('{"name": "add", "arguments": {"a": 1}, "more": none}') + "x",
         [*call("add", '{"a": 1}'), ', "more": none}\nx']),
        ("a <tool_call>no object</tool_call> b", ["a <tool_call>no object</tool_call> b"]),
        (tag("[1]"), [tag("[1]")]),
        (tag('{"name": 5, "arguments": {}}'), [tag('{"name": 5, "arguments": {}}')]),
        (tag('{"name": "add", "arguments": [1]}'), [tag('{"name": "add", "arguments": [1]}')]),
        ("<tool_call>" + one, ["<tool_call>", *one_part]),
        ('<tool_call>{"na', ['<tool_call>{"na']),
        ("", []),
    ]]


def _llama3() -> list[Case]:
    return [Case("llama3", text, parts) for text, parts in [
        ('{"name": "add", "parameters": {"a": 1}}', call("add", '{"a": 1}')),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', call("add", '{"a": 1}')),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
         [*call("add", '{"a": 1}'), *call("now", "{}")]),
        ('Sure.\n<|python_tag|>{"name": "add", "arguments": {"a": {"b": ";"}}} done',
         ["Sure.", *call("add", '{"a": {"b": ";"}}'), "done"]),
        ('{"type": "function", "name": "write", "parameters": {"text": "é\\n"}}', call("write", '{"text": "é\\n"}')),
        ('{"answer": 42}', ['{"answer": 42}']),
        ('{"name": "Bob", "age": 5}', ['{"name": "Bob", "age": 5}']),
        ('<|python_tag|>print("x")', ['<|python_tag|>print("x")']),
        ('<|python_tag|>{"name": "unknown", "parameters": {}}', []),
        ("plain {words}", ["plain {words}"]),
        ('  {"name": "add", "parameters": {"a": tru', call("add", '{"a": tru')),
    ]]


def _mistral() -> list[Case]:
    return [Case("mistral", text, parts) for text, parts in [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', call("add", '{"a": 1}')),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": [1]}}, {"name": "now", "arguments": {}}] after',
         [*call("add", '{"a": [1]}'), *call("now", "{}"), "after"]),
        ('Hm. [TOOL_CALLS] [{"name": "write", "arguments": {"text": "] [TOOL_CALLS] é"}, "id": "abc123def"}]',
         ["Hm.", *call("write", '{"text": "] [TOOL_CALLS] é"}')]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{}',
         [*call("add", '{"a": 1}'), *call("now", "{}")]),
        ('[TOOL_CALLS]add{"a": 1}', call("add", '{"a": 1}')),
        ("[TOOL_CALLS] nothing", ["[TOOL_CALLS] nothing"]),
        ("[TOOL_CALLS] [1, 2]", ["[TOOL_CALLS] [1, 2]"]),
        ('[TOOL_CALLS] [{"name": "unknown", "arguments": {"a": 1}}]', []),
        ("a [TOOL", ["a [TOOL"]),
    ]]


def _deepseek() -> list[Case]:
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    all_begin, all_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

    def v3(name: str, arguments: str) -> str:
        return f"{begin}function{sep}{name}\n```json\n{arguments}\n```{end}"

    def v31(name: str, arguments: str) -> str:
        return f"{begin}{name}{sep}{arguments}{end}"

    cases = []
    for name, write in (("deepseekv3", v3), ("deepseekv31", v31)):
        cases += [Case(name, text, parts) for text, parts in [
            (all_begin + write("add", '{"a": 1}') + all_end, call("add", '{"a": 1}')),
            (f"Wait.\n\n{all_begin}{write('add', '{}')}\n" + write("write", '{"text": "``` é"}') + all_end + " Bye.",
             ["Wait.", *call("add", "{}"), *call("write", '{"text": "``` é"}'), "Bye."]),
            (all_begin + write("unknown", '{"a": 1}') + all_end, []),
            (write("add", '{"a": {"b": [1, "\\\\"]}}'), call("add", '{"a": {"b": [1, "\\\\"]}}')),
            (all_begin + begin + "no call at all", [begin + "no call at all"]),
            (all_begin + write("add", '{"a": 1').removesuffix(end).removesuffix("\n```"), call("add", '{"a": 1')),
            ("Just <｜tool words.", ["Just <｜tool words."]),
        ]]
    return cases


def _kimi() -> list[Case]:
    def write(name: str, arguments: str) -> str:
        return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    return [Case("kimi_k2", text, parts) for text, parts in [
        (begin + write("functions.add:0", '{"a": 1}') + end, call("add", '{"a": 1}')),
        (f"Ok. {begin}{write('functions.add:0', '{}')}{write('now:1', ' {} ')}{end} More", [
            "Ok.", *call("add", "{}"), *call("now", "{}"), "More"]),
        (begin + write("functions.unknown:0", "{}") + end, []),
        (begin + write("functions.write:0", '{"text": "<|tool_call_end|> é\\""}') + end,
         call("write", '{"text": "<|tool_call_end|> é\\""}')),
        (begin + write("", "{}") + end, [write("", "{}")]),
        (begin + write("functions.add:0", "1 + 1") + end, [write("functions.add:0", "1 + 1")]),
        ("a <|tool", ["a <|tool"]),
    ]]


def _glm() -> list[Case]:
    def pair(key: str, value: str) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"

    return [Case("glm45", text, parts) for text, parts in [
        (f"<tool_call>add\n{pair('a', '1')}{pair('b', '-2')}</tool_call>", call("add", '{"a": 1, "b": -2}')),
        ("Hm.\n<tool_call>write\n" + pair("text", ' 12 "é" \\ <b>\n')
         + "</tool_call>\n<tool_call>now</tool_call> end", [
             "Hm.", *call("write", '{"text": " 12 \\"é\\" \\\\ <b>\\n"}'), *call("now", "{}"), "end"]),
        ("<tool_call>plan\n" + pair("steps", '[1, {"x": 2}]') + pair("fast", "True") + pair("size", "l")
         + "</tool_call>",
         call("plan", '{"steps": [1, {"x": 2}], "fast": true, "size": "l"}')),
        (f"<tool_call>write\n{pair('to', 'null')}</tool_call>", call("write", '{"to": null}')),
        (f"<tool_call>write\n{pair('to', '17')}</tool_call>", call("write", '{"to": "17"}')),
        (f"<tool_call>add\n{pair('a', 'many')}{pair('new', '5')}</tool_call>", call("add", '{"a": "many", "new": 5}')),
        ("<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", call("add", '{"a": 1}')),
        (f"<tool_call>unknown\n{pair('a', '1')}</tool_call>.", ["."]),
        ("<tool_call>what is this", ["<tool_call>what is this"]),
        ("<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>ab", call("write", '{"text": "ab')),
    ]]


def _qwen3_coder() -> list[Case]:
    def write(name: str, **parameters: str) -> str:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return [Case("qwen3_coder", text, parts) for text, parts in [
        (write("add", a="1", b="2"), call("add", '{"a": 1, "b": 2}')),
        ("Sure:\n" + write("write", text='x < y\n\n"é"') + "\n" + write("now") + "\nDone", [
            "Sure:", *call("write", '{"text": "x < y\\n\\n\\"é\\""}'), *call("now", "{}"), "Done"]),
        (write("plan", options='{"a": [1]}', fast="false"), call("plan", '{"options": {"a": [1]}, "fast": false}')),
        (write("write", note="5"), call("write", '{"note": "5"}')),
        (write("unknown", a="1"), []),
        ("<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", call("add", '{"a": 1}')),
        ("<tool_call>\nadd(1)\n</tool_call>", ["<tool_call>\nadd(1)\n</tool_call>"]),
        ("<tool_call>\n<function=write>\n<parameter=text>\nab\n", call("write", '{"text": "ab\\n')),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</fun", call("add", '{"a": 1')),
    ]]


def _pythonic() -> list[Case]:
    return [Case("pythonic", text, parts) for text, parts in [
        ("[add(a=1, b=-2)]", call("add", '{"a": 1, "b": -2}')),
        ("[now()]", call("now", "{}")),
        ("<|python_start|>[add(a=1), write(text='it\\'s, \"é\")')]<|python_end|>",
         [*call("add", '{"a": 1}'), *call("write", '{"text": "it\'s, \\"é\\")"}')]),
        ("Now:\n[plan(steps=[1, {'x': (2, None)}], fast=True, size=true)] after [1] b",
         ["Now:", *call("plan", '{"steps": [1, {"x": [2, null]}], "fast": true, "size": true}'), "after [1] b"]),
        ("See [add] and [unknown(a=1)].", ["See [add] and [unknown(a=1)]."]),
        ("[add(a=x y)]", call("add", '{"a": "x y"}')),
        ("[1, 2, 3]", ["[1, 2, 3]"]),
        ("[add(a=1, b=", call("add", '{"a": 1')),
    ]]


def _gpt_oss() -> list[Case]:
    analysis = "<|channel|>analysis<|message|>Need the sum. <|end|>"
    sum_call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    return [Case("gpt-oss", text, parts) for text, parts in [
        (f"{analysis}<|start|>assistant{sum_call}", call("add", '{"a": 1}')),
        (sum_call.removesuffix("<|call|>"), call("add", '{"a": 1}')),
        (f"{analysis}<|start|>assistant<|channel|>final<|message|>It is é. <|return|>", ["It is é."]),
        ("<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant" + sum_call,
         ["I will look.", *call("add", '{"a": 1}')]),
        ("<|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>", call("now", "{}")),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', call("add", '{"a": 1}')),
        ("to=b or not", ["to=b or not"]),
        (" to boldly go", [" to boldly go"]),
        (f"{sum_call}<|start|>assistant{sum_call.replace('add', 'now')}", [
            *call("add", '{"a": 1}'), *call("now", '{"a": 1}')]),
        ("<|channel|>commentary to=functions.unknown<|message|>{}<|call|>", []),
        ("no channels here", ["no channels here"]),
        ('<|channel|>commentary to=functions.add<|message|>{"a": [1, {"b": "\\"', call("add", '{"a": [1, {"b": "\\"')),
    ]]


def _json_array() -> list[Case]:
    return [Case("json", text, parts) for text, parts in [
        ('[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]',
         [*call("add", '{"a": 1}'), *call("now", "{}")]),
        ('{"name": "add", "parameters": {"a": 1}}', call("add", '{"a": 1}')),
        ('[{"name": "add", "parameters": {"a": 1', call("add", '{"a": 1')),
        ("no array", ["no array"]),
    ]]


def _damaged() -> list[Case]:
    """Answers that end early, or begin like a call and are none."""
    begin, sep = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    return [Case(name, text, parts) for name, text, parts in [
        ("deepseekv3", f"{begin}function{sep}add\nno fence", [f"{begin}function{sep}add\nno fence"]),
        ("deepseekv3", f"{begin}function{sep}add\n```json\n[1]", [f"{begin}function{sep}add\n```json\n[1]"]),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n", call("add", '{"a": 1')),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_", [ToolCallStart("add")]),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>1", [ToolCallStart("add"), "1"]),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1", call("add", '{"a": ')),
        ("mistral", "[TOOL_CALLS] {}", ["[TOOL_CALLS] {}"]),
        ("qwen3_coder", "<function=add>\n<parameter=a b", [ToolCallStart("add"), "b"]),
        ("qwen3_coder", "<function=add>\n<parameter=a>\n1", call("add", '{"a": ')),
        ("qwen3_coder", "<function=add x>", ["<function=add x>"]),
        ("pythonic", "[add(1)]", [ToolCallStart("add"), ")]"]),
        ("pythonic", "[add(a=1j)]", call("add", '{"a": "1j"}')),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{a"}</tool_call>',
         ['<tool_call>{"name": "add", "arguments": "{a"}</tool_call>']),
        ("llama3", '{"parameters": {}, "name": "add", "more": 1}', call("add", "{}")),
    ]]


CASES = [case for cases in (_hermes, _llama3, _mistral, _deepseek, _kimi, _glm, _qwen3_coder, _pythonic, _gpt_oss,
                            _json_array, _damaged) for case in cases()]
