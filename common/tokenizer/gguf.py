"""Tokenizers from the metadata of GGUF files: byte-level BPE ("gpt2") and SentencePiece's ("llama").

A file names its splitting of texts (``tokenizer.ggml.pre``), and the expressions are those of the tokenizer.json of the
models that the name is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.gguf_file import GgufFile, find_gguf, read_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
           r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "qwen2": _QWEN2,
           "deepseek-r1-qwen": _QWEN2, "stablelm2": _QWEN2, "tekken": _TEKKEN, "gpt-2": "", "default": ""}
"""Expressions that split texts, by the name of the splitting; GPT-2's is the library's own."""
_BEGINS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
"""Splittings of models whose texts begin with a token, where a file does not say."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""ggml's types of tokens."""
_OTHER_PATH = "give the folder of its tokenizer by --tokenizer-path"


def gguf_of(folder: Path) -> Path | None:
    """Returns the GGUF file whose metadata a folder's (or a file's own) tokenizer is in; None where there is none, or
    there are files of a tokenizer."""
    if folder.suffix != ".gguf" and any((folder / name).exists() for name in
                                        ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")):
        return None
    return find_gguf(folder)


def load_gguf_tokenizer(path: Path) -> Any:
    """Returns a tokenizer of transformers with the vocabulary of a GGUF file; raises ConfigError."""
    from transformers import PreTrainedTokenizerFast

    file = read_gguf(path)
    kind = _key(file, "model")
    if kind not in _MAKERS or not _key(file, "tokens"):
        raise ConfigError(f"{path} has a tokenizer of the kind {kind!r}, which is not supported: {_OTHER_PATH}.")
    try:
        made = _MAKERS[kind](file)
    except KeyError as error:
        raise ConfigError(f"{path} splits texts as {error.args[0]!r}, which is not supported: {_OTHER_PATH}.") from None
    named = {f"{name}_token": _key(file, "tokens")[token] for name, key in
             (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
             if (token := _key(file, f"{key}_token_id")) is not None}
    _add_special(made, file)
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=file.metadata.get("tokenizer.chat_template"),
                                   clean_up_tokenization_spaces=False, **named)


def _key(file: GgufFile, name: str, default: Any = None) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{name}", default)


def _byte_level(file: GgufFile) -> FastTokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = _SPLITS[_key(file, "pre", "default")]
    merges = [tuple(merge.split(" ", 1)) for merge in _key(file, "merges", [])]
    made = Tokenizer(models.BPE(vocab=_vocabulary(file), merges=merges, ignore_merges=split in (_LLAMA3, _TEKKEN)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    made.pre_tokenizer = byte_level if not split else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), byte_level])
    made.decoder = decoders.ByteLevel()
    _add_ends(made, file, begins=_key(file, "pre", "default") in _BEGINS)
    return made


def _sentence_piece(file: GgufFile) -> FastTokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, unknown = _key(file, "tokens"), _key(file, "unknown_token_id", 0)
    vocabulary = _vocabulary(file)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(vocabulary, _key(file, "scores", [])),
                                unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefixed = _key(file, "add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefixed else replace
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    _add_ends(made, file, begins=True)
    return made


_MAKERS = {"gpt2": _byte_level, "llama": _sentence_piece}


def _vocabulary(file: GgufFile) -> dict[str, int]:
    return {token: index for index, token in enumerate(_key(file, "tokens"))}


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns the pairs that SentencePiece would join, best first: of every piece its splits into two pieces."""
    found: list[tuple[float, tuple[str, str]]] = []
    for piece, index in vocabulary.items():
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))
                 if piece[:at] in vocabulary and piece[at:] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found.extend((-scores[index], pair) for pair in pairs)
    found.sort(key=lambda item: item[0])
    return [pair for _, pair in found]


def _add_ends(made: FastTokenizer, file: GgufFile, *, begins: bool) -> None:
    """Adds the tokens with which texts begin and end."""
    from tokenizers import processors

    ends = {}
    for name, default in (("bos", begins), ("eos", False)):
        token = _key(file, f"{name}_token_id")
        if token is not None and _key(file, f"add_{name}_token", default):
            ends[name] = _key(file, "tokens")[token], token
    if ends:
        parts = [*([ends["bos"][0]] if "bos" in ends else []), "$A", *([ends["eos"][0]] if "eos" in ends else [])]
        pair = [part if part != "$A" else "$B" for part in parts]
        template = processors.TemplateProcessing(single=" ".join(parts), pair=" ".join([*parts, *(
            f"{part}:1" for part in pair)]), special_tokens=[*ends.values()])
        before = made.post_processor
        made.post_processor = template if before is None else processors.Sequence([before, template])


def _add_special(made: FastTokenizer, file: GgufFile) -> None:
    from tokenizers import AddedToken

    tokens, types = _key(file, "tokens"), _key(file, "token_type", [])
    made.add_special_tokens([AddedToken(token, normalized=False, special=True)
                             for token, kind in zip(tokens, types) if kind in (_UNKNOWN, _CONTROL)])
    made.add_tokens([AddedToken(token, normalized=False, special=False)
                     for token, kind in zip(tokens, types) if kind == _USER_DEFINED])
