"""A checkpoint's tokenizer: loading, encoding, chat templates, and the bytes of each token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError, InvalidRequest
from ..api.sampling import SamplingParams
from ..config.remote import fetch_metadata, is_remote
from ..tinychat import packaged_checkpoint
from .gguf import gguf_of, load_gguf_tokenizer
from .templates import load_template
from .text_stream import TextStream
from .token_bytes import TokenDecoder, token_decoder

_MAX_INLINE_CHARS = 20_000  # encoding takes about a microsecond each, which blocks the event loop
_RESERVED = frozenset((
    "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "add_generation_prompt",
    "continue_final_message", "tokenizer_kwargs"))


def load_tokenizer(path: str, revision: str | None = None, *, trust_remote_code: bool = False,
                   download_dir: str | None = None) -> Tokenizer:
    """Load from a folder or the hub; 'tinychat' is the packaged model. Raises ConfigError with one sentence.

    With ``trust_remote_code`` it may be code of the checkpoint, which is run. ``download_dir`` is the folder of
    downloads. Takes seconds: it imports transformers.
    """
    if is_remote(path):
        path = str(fetch_metadata(path, download_dir))
    folder = packaged_checkpoint(path) or Path(path).expanduser()
    file = gguf_of(folder) if folder.exists() else None
    if not folder.is_dir() and not file and (folder.is_absolute() or path.startswith((".", "~"))
                                             or path.count("/") > 1):
        raise ConfigError(f"There is no tokenizer folder {folder}; set --model-path or --tokenizer-path to one that "
                          "holds tokenizer.json.")
    from transformers import AutoTokenizer
    library = logging.getLogger("transformers")
    library.handlers.clear()  # its log goes to the root logger's handlers
    library.propagate = True
    if file is not None:
        return Tokenizer(load_gguf_tokenizer(file))
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else path, revision=revision, cache_dir=download_dir,
            trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ConfigError(f"The tokenizer of {path} is code that the checkpoint ships: give --trust-remote-code if "
                              "you trust it as you trust a program, or another --tokenizer-path.") from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(f"Cannot load a tokenizer from {path}: {reason}.") from None
    return Tokenizer(loaded)


class Tokenizer:
    """A transformers tokenizer with the methods that the API server needs."""

    def __init__(self, hf: Any, chat_template: str | None = None, stops: Sequence[str] = (), *,
                 decode_token: TokenDecoder | None = None):
        """``chat_template`` (jinja source) replaces the checkpoint's own; ``stops`` end its answers. ``decode_token``
        gives the bytes of tokens where ``hf`` knows none: then texts are empty, and nothing can be found in them."""
        self.has_texts = decode_token is None
        self._hf = hf
        self._chat_template = chat_template
        self._stops = stops
        self._decode_token = decode_token or token_decoder(hf)
        self._token_bytes: dict[int, bytes] = {}
        added = getattr(hf, "added_tokens_decoder", {})
        self.special_ids = frozenset(hf.all_special_ids) | {i for i, token in added.items() if token.special}

    @property
    def hf(self) -> Any:
        """The tokenizer of transformers."""
        return self._hf

    def with_chat_template(self, name: str) -> Tokenizer:
        """This tokenizer with another template, a packaged one or a file's; raises ConfigError."""
        import jinja2
        template = load_template(name)
        try:
            self._hf.apply_chat_template([{"role": "user", "content": "Hello"}], chat_template=template.source,
                                        tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}, {error.message}"
            raise ConfigError(f"--chat-template {name} is not valid jinja: {where}.") from None
        except jinja2.TemplateError:
            pass  # a template may well reject this conversation
        source = template.source
        if template.begins_as_text and self.bos_id is not None and self.encode("")[:1] == [self.bos_id]:
            source = "{{- bos_token -}}" + source
        return Tokenizer(self._hf, source, template.stops)

    def with_named_template(self, name: str) -> Tokenizer:
        """This tokenizer with the template of this name, where its checkpoint has several; raises ConfigError."""
        found = self._hf.chat_template
        templates = found if isinstance(found, dict) else {"default": found} if found else {}
        if name not in templates:
            names = ", ".join(sorted(templates)) or "none"
            raise ConfigError(f"--hf-chat-template-name {name} is not among the chat templates of the checkpoint: "
                              f"{names}.")
        return Tokenizer(self._hf, templates[name], self._stops)

    @property
    def chat_template(self) -> str | None:
        """The jinja source of the template for chats with tools, None where there is no template."""
        if self._chat_template is not None:
            return self._chat_template
        template = self._hf.chat_template
        if isinstance(template, dict):  # templates by name
            template = template.get("tool_use") or template.get("default")
        return template or None

    def chat_stops(self, vocab_size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The stops of the chat template, besides the model's own: strings, and special tokens, which the text leaves
        out. Tokens beyond the model's vocabulary are never sampled."""
        if not self._stops:
            return (), ()
        ids = dict(zip(self._hf.convert_ids_to_tokens(sorted(self.special_ids)), sorted(self.special_ids)))
        return (tuple(stop for stop in self._stops if stop not in ids),
                tuple(ids[stop] for stop in self._stops if stop in ids and ids[stop] < vocab_size))

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        return frozenset(self._hf.convert_ids_to_tokens(sorted(self.special_ids)))

    def any_special(self, words: Iterable[str]) -> bool:
        """True where one of ``words`` is a special token, which ``skip_special_tokens`` leaves out of the text."""
        return not self._special_texts.isdisjoint(words)

    @property
    def bos_id(self) -> int | None:
        """The token that a text begins with, None where the model has none."""
        result: int | None = self._hf.bos_token_id
        return result

    @property
    def size(self) -> int:
        """Token ids are below this; added tokens are in it."""
        return len(self._hf)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest tokens."""
        return max(map(len, self._hf.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        result: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens)
        return result

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Two texts as the tokenizer joins them, for models that judge pairs."""
        result: list[int] = self._hf.encode(first, second)
        return result

    async def encode_many(self, texts: Sequence[str], *, limit: int,
                          add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text; large ones are encoded off the event loop.

        Raises InvalidRequest, without encoding it, for a text that cannot have ``limit`` tokens or fewer.
        """
        for text in texts:
            if len(text) > limit * self.longest_token:
                raise InvalidRequest(
                    f"The prompt of {len(text)} characters is longer than the model's context length: this model's "
                    f"maximum context length is {limit} tokens. Shorten it.",
                    code="context_length_exceeded")

        def encode_all() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        if sum(map(len, texts)) < _MAX_INLINE_CHARS:
            return encode_all()
        return await asyncio.to_thread(encode_all)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        result: str = self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return result

    def token_strs(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's names of tokens, empty for an id without one (padded vocabularies)."""
        return [name or "" for name in self._hf.convert_ids_to_tokens(list(ids))]

    def token_str(self, token_id: int) -> str:
        """The vocabulary's name of a token, empty for an id without one."""
        return self._hf.convert_ids_to_tokens(token_id) or ""

    def tokens_beyond(self, vocab_size: int) -> dict[int, str]:
        """The tokens that a text may become and a model of ``vocab_size`` does not have, in order."""
        return {token: name for name, token in sorted(self._hf.get_vocab().items(), key=lambda item: item[1])
                if token >= vocab_size}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; empty for an id outside the vocabulary."""
        cached = self._token_bytes.get(token_id)
        if cached is None:
            cached = self._token_bytes[token_id] = self._decode_token(token_id)
        return cached

    def text_stream(self, sampling: SamplingParams) -> TextStream:
        """Raises InvalidRequest for stop strings where texts are empty."""
        if not self.has_texts and (sampling.stop or sampling.stop_regex):
            raise InvalidRequest("This server was started with --skip-tokenizer-init and cannot look for stop strings: "
                                 "send stop_token_ids.", param="stop")
        return TextStream(self.token_bytes, self.special_ids, sampling)

    def render_chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None,
                    continue_final_message: bool, options: Mapping[str, Any],
                    add_generation_prompt: bool | None = None, template: str | None = None) -> str:
        """The prompt's text by the chat template, or by ``template`` in its place; ``options`` are further variables
        for the template. It ends with the beginning of an answer (``add_generation_prompt``), unless the final message
        is to be continued.

        Raises InvalidRequest where there is no template or it rejects the messages.
        """
        source = self._chat_template if template is None else template
        if source is None and not self._hf.chat_template:
            raise InvalidRequest("The model has no chat template: use /v1/completions, or start the server with "
                                 "--chat-template.", code="no_chat_template")
        if reserved := _RESERVED & options.keys():
            raise InvalidRequest(f"chat_template_kwargs must not set {min(reserved)!r}.", param="chat_template_kwargs")
        import jinja2
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        try:
            result: str = self._hf.apply_chat_template(
                       messages, tools=tools, chat_template=source, tokenize=False,
                       add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                       **options)
            return result
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(f"The chat template rejects the messages: {error}", param="messages") from None
