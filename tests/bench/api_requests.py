"""Requests made from an OpenAPI document: what its schemas allow, and then bent. For ``api_fuzz``."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

LEFT_OUT = frozenset((
    "/pause_generation",  # all other requests would wait
    "/update_weight_version",  # servers of different versions are no pair
    "/update_weights_from_disk",  # would be another model for all that follows
    "/release_memory_occupation", "/resume_memory_occupation", "/set_internal_state",  # and these another server
    "/start_profile", "/stop_profile", "/dump_expert_distribution_record",  # fill the disk
))
LIMITS = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "max_new_tokens": 4, "n": 2,
          "best_of": 2}
BOUNDED = {"/v1/chat/completions": "max_tokens", "/v1/completions": "max_tokens", "/v1/messages": "max_tokens",
           "/v1/responses": "max_output_tokens", "/generate": "max_new_tokens"}
TEXTS = ["What is the capital of France?", "", "a", " ", "\0", "é€🙂", "\u202e\ufeff\u2028", "<|im_end|>",
         "<tool_call>", "{}", "%s%n", "../../etc/passwd", "x" * 5000, "\ud7ff\ue000", "null", "-1", "1e999"]
NUMBERS = [0, 1, -1, 2, 0.5, -0.0, 1e-300, 1e308, 2**31, -2**31 - 1, 2**53 + 1, 2**63, -2**63 - 1, 2**64, 10**40,
           10**400]
HINTS: dict[str, list[Any]] = {
    "model": ["tinychat", "tinychat", "tinychat", "gpt-5"], "role": ["user", "user", "assistant", "system", "tool"],
    "temperature": [0, 0.7, 1], "top_p": [1, 0.5], "top_k": [-1, 1, 5], "min_p": [0, 0.1], "seed": [1, 2],
    "type": ["text", "function", "message", "input_text", "function_call", "function_call_output", "tool_use", "custom",
             "tool_result", "json_object", "json_schema", "auto", "tool", "any", "enabled", "disabled", "created_at"],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}}],
    "regex": ["[a-c]{1,3}", "(", "a*" * 20, "(a|b)*c"], "ebnf": ["root ::= \"a\" | \"b\"", "root ::="],
    "endpoint": ["/v1/chat/completions", "/v1/completions"], "method": ["POST"], "stop": ["e", ["a", "b"], "\n"],
    "completion_window": ["24h", "1s", "5m"], "finish_reason": ["stop"], "name": ["f", "g"], "arguments": ["{}", "{"],
    "messages": [[{"role": "user", "content": "What is the capital of France?"}], [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": [
            {"type": "text", "text": "What is 2 plus 3?"}]}]],
    "prompt": ["How do you spell banana?", ["a", "b"], [5, 6, 7]], "text": ["How do you spell banana?", ["a", "b"]],
    "input": ["What is 2 plus 3?", [{"role": "user", "content": "Hi"}]], "input_ids": [[5, 6, 7], [[5], [6, 7]]],
    "thinking": [{"type": "enabled"}, {"type": "disabled"}],
    "top_logprobs": [0, 2], "logprobs": [True, 1], "stream": [True, False, False],
    "rid": ["r1", "r2"], "custom_id": ["1", "2"], "encoding_format": ["float", "base64"], "id": ["c1", "c2"],
}
REFUSED = frozenset(("image_data", "audio_data", "video_data", "lora_path", "conversation", "previous_response_id",
                     "return_hidden_states", "background", "truncation", "max_tool_calls"))
"""Of little use more than once: the servers refuse most of their values."""
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"]
HEADERS = [
    b"Content-Type: text/plain", b"Content-Type: application/json; charset=latin-1", b"Content-Type: \xff\xfe",
    b"Content-Type: multipart/form-data", b"Accept: nothing/*", b"Accept-Encoding: gzip, br, zstd",
    b"X-Request-Id: \xe9\x01", b"X-Request-Id: " + b"a" * 3000, b"Authorization: Bearer " + b"k" * 500,
    b"Authorization: \xff", b"x-api-key: \xff\xfe", b"X-Baton-Token-Ids: 1", b"x-baton-prompt-pages: 1",
    b"traceparent: 00-zz-zz-01", b"Expect: 100-continue", b"Connection: close", b"Cookie: a=b; c", b"Range: bytes=5-2",
    b"If-None-Match: *", b"If-Modified-Since: never", b"Content-Encoding: gzip", b"X-Forwarded-For: ::1",
    b"anthropic-version: 2023-06-01", b"X-Session-Id: s", b"Priority: u=9"]


@dataclass
class Schemas:
    """Makes values of the document's schemas."""

    document: dict[str, Any]
    rng: random.Random
    known: dict[str, list[str]] = field(default_factory=lambda: {"file_id": ["file-x"], "batch_id": ["batch_x"]})

    def value(self, schema: dict[str, Any], depth: int = 0, key: str = "") -> Any:
        rng = self.rng
        if key == "input_file_id":
            return rng.choice(self.known["file_id"])
        if key in HINTS and rng.random() < 0.8:
            return copy.deepcopy(rng.choice(HINTS[key]))
        if "$ref" in schema:
            return self.value(self.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], depth, key)
        if "anyOf" in schema:
            options = [option for option in schema["anyOf"] if option != {"type": "null"} or rng.random() < 0.2]
            return self.value(rng.choice(options), depth, key)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        return self._typed(schema, depth)

    def _typed(self, schema: dict[str, Any], depth: int) -> Any:
        rng, kind = self.rng, schema.get("type")
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            items = schema.get("items") or {}
            return [self.value(items, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3)) if depth < 6 else 0)]
        simple = {"string": lambda: rng.choice(TEXTS[:3]), "integer": lambda: rng.randrange(5), "null": lambda: None,
                  "number": lambda: rng.choice((0, 0.5, 1)), "boolean": lambda: rng.random() < 0.5}
        return simple[kind]() if kind in simple else anything(rng, 3)

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, required = self.rng, schema.get("required", ())
        share = rng.choice((0.0, 0.02, 0.05, 0.2))
        found = {name: self.value(inner, depth + 1, name) for name, inner in schema.get("properties", {}).items()
                 if name in required or (depth < 5 and rng.random() < (share / 10 if name in REFUSED else share))}
        if not found and isinstance(schema.get("additionalProperties"), dict):
            found = {rng.choice(("5", "a")): self.value(schema["additionalProperties"], depth + 1)}
        return found


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 5:
        return [None, rng.random() < 0.5, rng.choice(NUMBERS), rng.choice(TEXTS), rng.randrange(100)][kind]
    if kind == 5:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        value: Any = rng.choice(NUMBERS)
        for _ in range(rng.choice((3, 50, 200))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return {rng.choice([*HINTS, "", "é", "__class__", "\0"]): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def bend(rng: random.Random, body: Any) -> Any:
    """The body with something wrong somewhere in it."""
    if isinstance(body, (dict, list)) and body and rng.random() < 0.7:
        at = rng.choice(list(body)) if isinstance(body, dict) else rng.randrange(len(body))
        chance = rng.random()
        if chance < 0.6:
            body[at] = bend(rng, body[at])
        elif chance < 0.75:
            del body[at]
        elif isinstance(body, dict):
            body[rng.choice([*HINTS, "unknown", "é", "", "stream", "n", "messages"])] = anything(rng)
        return body
    return anything(rng)


def bound(rng: random.Random, body: Any, path: str) -> Any:
    """Keep an answer short: what limits it is there, and small or refused."""
    if isinstance(body, list):
        return [bound(rng, item, "") for item in body]
    if not isinstance(body, dict):
        return body
    if path == "/generate":
        if not {"text", "input_ids", "input_embeds"} & body.keys() and rng.random() < 0.9:
            body["text"] = "How do you spell banana?"
        given = body.get("sampling_params")
        if not given or not isinstance(given, (dict, list)):
            body["sampling_params"] = given = {}
        for one in given if isinstance(given, list) else [given]:
            if isinstance(one, dict):
                one.setdefault("max_new_tokens", 2)
    elif path in BOUNDED:
        body.setdefault(BOUNDED[path], 2)
    for name, value in list(body.items()):
        most = LIMITS.get(name)
        if most is None:
            body[name] = bound(rng, value, "")
        elif not isinstance(value, int) or not 0 <= value <= most:
            body[name] = rng.choice((rng.randrange(most + 1), 1, -1, 10**9, 2**63, "4", 1.5, [], True))
    return body


class Requests:
    """Makes requests from a document; ``next`` is a method, a target and what is sent."""

    def __init__(self, document: dict[str, Any], rng: random.Random):
        self._rng = rng
        self.schemas = Schemas(document, rng)
        self._operations = [(method.upper(), path, operation) for path, methods in document["paths"].items()
                            for method, operation in methods.items() if path not in LEFT_OUT]
        weighty = [item for item in self._operations if item[1] in BOUNDED]
        self._operations += weighty * 4

    def next(self) -> tuple[str, bytes]:
        rng = self._rng
        method, path, operation = rng.choice(self._operations)
        target = path
        query = []
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            given = rng.choice(self.schemas.known.get(name, ["tinychat"])) if rng.random() < 0.8 else rng.choice(TEXTS)
            if parameter["in"] == "path":
                target = target.replace("{" + name + "}", quote(given[:500], safe="") or "_")
            elif rng.random() < 0.4:
                query.append(f"{name}={quote(str(anything(rng, 4))[:200])}")
        if rng.random() < 0.03:
            query.append("".join(rng.choice("ab=&%2:/9;") for _ in range(rng.randrange(30))))
        target += "?" + "&".join(query) if query else ""
        if rng.random() < 0.05:
            method = rng.choice(METHODS)
        headers, content = self._content(path, operation)
        extra = [rng.choice(HEADERS) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))]
        if any(line.startswith(b"Content-Type") for line in extra) and rng.random() < 0.9:
            headers = []  # two of them are refused before anything else is looked at
        lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: fuzz", *headers, *extra]
        if content and rng.random() < 0.1:
            middle = len(content) // 2
            pieces = [piece for piece in (content[:middle], content[middle:]) if piece]
            content = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
            lines.append(b"Transfer-Encoding: chunked")
        else:
            lines.append(b"Content-Length: %d" % len(content))
        return method, b"\r\n".join(lines) + b"\r\n\r\n" + content

    def _content(self, path: str, operation: dict[str, Any]) -> tuple[list[bytes], bytes]:
        rng, body = self._rng, operation.get("requestBody", {"content": {}})["content"]
        if "multipart/form-data" in body:
            return self._form()
        if "application/json" not in body:
            return [], rng.choice((b"", b"", b"", b"{}", b"x"))
        value = self.schemas.value(body["application/json"]["schema"])
        for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2, 4))):
            value = bend(rng, value)
        text = json.dumps(bound(rng, value, path), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        chance = rng.random() * 2
        if chance < 0.03:
            text = text[:rng.randrange(len(text) + 1)]
        elif chance < 0.05 and path not in BOUNDED:
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.randbytes(rng.randrange(1, 4)) + text[at:]
        elif chance < 0.07:
            text = text.replace(b"\"", b"\"\\ud800", 1) if rng.random() < 0.5 else b"[" * rng.choice((10, 5000))
        return [b"Content-Type: application/json"], text

    def _form(self) -> tuple[list[bytes], bytes]:
        rng = self._rng
        line = {"custom_id": "1", "method": "POST", "url": rng.choice(HINTS["endpoint"]), "body": {
            "model": "tinychat", "max_tokens": 2, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}}
        content = b"\n".join(json.dumps(line | {"custom_id": str(i)}).encode() for i in range(rng.randrange(5)))
        fields = {b"purpose": b"batch", b"file": rng.choice((content, content, content, rng.randbytes(300)))}
        if rng.random() < 0.2:
            name = rng.choice((b"purpose", b"other", b"expires_after[seconds]", b"expires_after[anchor]"))
            fields[name] = rng.choice((b"vision", b"5", b"created_at", b"\xff", b"x" * 2000))
        parts = [b"--b\r\nContent-Disposition: form-data; name=\"%b\"%b\r\n\r\n%b\r\n" % (
            name, b"; filename=\"f.jsonl\"" if name == b"file" else b"", value) for name, value in fields.items()]
        text = b"".join(parts) + b"--b--\r\n"
        if rng.random() < 0.15:
            text = text[:rng.randrange(len(text))]
        return [b"Content-Type: multipart/form-data; boundary=b"], text
