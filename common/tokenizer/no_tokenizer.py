"""The tokenizer of a server without one (``--skip-tokenizer-init``), whose requests and answers are token ids."""

from __future__ import annotations

from typing import Any, NoReturn

from ..api.errors import InvalidRequest
from .tokenizer import Tokenizer


def no_tokenizer() -> Tokenizer:
    """A tokenizer that knows no tokens: each has an empty text, and InvalidRequest is raised for texts."""
    return Tokenizer(_NoVocabulary(), decode_token=lambda token: b"")


class _NoVocabulary:
    """The part of a transformers tokenizer that ``Tokenizer`` uses."""

    all_special_ids: tuple[int, ...] = ()
    bos_token_id = None
    chat_template = None

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return [""] * len(ids) if isinstance(ids, list) else ""

    def encode(self, *args: Any, **options: Any) -> NoReturn:
        raise InvalidRequest("This server was started with --skip-tokenizer-init and reads no texts: send token ids "
                             "(input_ids of /generate, or a list as the prompt of /v1/completions).")

    get_vocab = decode = apply_chat_template = __len__ = encode
