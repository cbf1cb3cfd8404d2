"""Texts that an operator gives NGRAM to draft from, for the requests of all namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..api.errors import ConfigError
from ..api.namespace import SHARED, Namespace
from ..config.server import ModelArgs, SpeculativeArgs
from ..request.req import Req
from ..request.token_buffer import TokenBuffer
from ..tokenizer.tokenizer import load_tokenizer
from .ngram_index import Match, NgramIndex

_FLAG = "--speculative-ngram-external-corpus-path"
_MOST_TOKENS = 1 << 20
"""Longer documents are indexed in parts of this many tokens."""
_ENTRIES_A_TOKEN = 16
"""Entries of the index for each token: an n-gram of each length, in buckets that are filled unevenly."""


@dataclass(frozen=True, eq=False)
class Document:
    """Tokens of a text."""

    tokens: TokenBuffer
    namespace: Namespace = SHARED


class NgramCorpus:
    """An index of documents, which never change."""

    def __init__(self, args: SpeculativeArgs, documents: Sequence[Sequence[int]]):
        self.num_tokens = sum(map(len, documents))
        self._index = NgramIndex(args.speculative_ngram_min_match_window_size,
                                 args.speculative_ngram_max_match_window_size, _ENTRIES_A_TOKEN * self.num_tokens)
        for document in documents:
            for begin in range(0, len(document), _MOST_TOKENS):
                self._index.add(Document(TokenBuffer(list(document[begin:begin + _MOST_TOKENS]))))

    def match(self, reqs: Sequence[Req], limits: Sequence[int], most: int) -> list[Match | None]:
        """Returns what followed the last tokens of ``reqs`` in the documents; see ``NgramIndex.match``."""
        return self._index.find(reqs, SHARED, limits, most)


def read_corpus(args: SpeculativeArgs, model: ModelArgs) -> NgramCorpus:
    """Reads the file of --speculative-ngram-external-corpus-path, a JSON string in each line. Raises ConfigError."""
    path = args.speculative_ngram_external_corpus_path
    assert path is not None
    tokenizer = load_tokenizer(model.tokenizer_path or model.model_path,
                               None if model.tokenizer_path else model.revision,
                               trust_remote_code=model.trust_remote_code, download_dir=model.download_dir)
    documents, left = [], args.speculative_ngram_external_corpus_max_tokens
    for text in _texts(Path(path).expanduser()):
        documents.append(tokenizer.encode(text, add_special_tokens=False))
        left -= len(documents[-1])
        if left < 0:
            raise ConfigError(f"{_FLAG} {path} has more than {args.speculative_ngram_external_corpus_max_tokens} "
                              "tokens: raise --speculative-ngram-external-corpus-max-tokens (a token takes 128 bytes "
                              "of each rank's memory), or shorten it.")
    return NgramCorpus(args, documents)


def _texts(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, f"{_FLAG} {path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {_FLAG} {path}: {error}.") from None


def _text_of(line: str, where: str) -> str:
    try:
        text = json.loads(line)
    except ValueError:
        text = None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: each line must be a JSON string, such as "one document".')
    return text
