"""The bytes of each token.

A token's bytes do not depend on its neighbours in the two families of decoders that today's checkpoints use, so a
table lookup replaces a call of the tokenizer for every generated token:

* byte-level BPE (Llama 3, Qwen, GPT): a character of a token is one byte, by GPT-2's alphabet;
* SentencePiece with byte fallback (Llama 2, Mistral, Gemma): ``▁`` is a space and ``<0xE2>`` one byte.

For any other decoder a token is decoded after a fixed token, whose own text is then removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

TokenDecoder = Callable[[int], bytes]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_decoder(tokenizer: Any) -> TokenDecoder:
    """A function that returns the bytes of a transformers tokenizer's tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kinds = backend.decoder.__getstate__() if backend is not None and backend.decoder is not None else b""
    if b"ByteLevel" in kinds:
        return _byte_level(tokenizer.convert_ids_to_tokens)
    if b"ByteFallback" in kinds or b"Metaspace" in kinds:
        return _sentencepiece(tokenizer.convert_ids_to_tokens)
    return _after_anchor(tokenizer)


def _byte_level(token_of: Callable[[int], str | None]) -> TokenDecoder:
    alphabet = byte_alphabet()

    def decode(token_id: int) -> bytes:
        token = token_of(token_id) or ""
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # an added token such as '<｜end｜>' is plain text
            return token.encode("utf-8")

    return decode


def _sentencepiece(token_of: Callable[[int], str | None]) -> TokenDecoder:
    byte_token = re.compile(r"<0x([0-9A-F]{2})>")

    def decode(token_id: int) -> bytes:
        token = token_of(token_id) or ""
        byte = byte_token.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode("utf-8")

    return decode


def _after_anchor(tokenizer: Any) -> TokenDecoder:
    anchor = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(anchor, skip_special_tokens=False)

    def decode(token_id: int) -> bytes:
        text = tokenizer.decode([*anchor, token_id], skip_special_tokens=False)
        result: bytes = text[len(before):].encode("utf-8") if text.startswith(before) else text.encode("utf-8")
        return result

    return decode
