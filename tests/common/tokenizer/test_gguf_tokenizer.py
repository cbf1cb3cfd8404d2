"""Tokenizers from GGUF metadata encode and decode as those whose vocabulary the files have."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from baton.common.api.errors import ConfigError
from baton.common.tokenizer.gguf import _SPLITS
from baton.common.tokenizer.tokenizer import load_tokenizer

TEXTS = ["Der Fluß fließt, it's 12345 miles long.\n\n  Two  spaces 中文 🙂", "def f(x):\n\treturn x ** 2  # 7",
         " a", ""]
CORPUS = ["the river runs to the sea, it's 1234 miles", "def f(x): return x ** 2", "the sea and the river"] * 3


def save(path: Path, kind: str, made: Tokenizer, **values) -> None:
    """Writes the vocabulary of ``made``; its added token is a control token."""
    writer = gguf.GGUFWriter(str(path), "llama")
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "<unk>") else 6 if token.startswith("<0x") else 1
                            for token in tokens])
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_bos_token_id(vocabulary["<s>"])
    writer.add_eos_token_id(vocabulary["<s>"])
    writer.add_chat_template("{% for m in messages %}<s>{{ m.content }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("name,begins", [("llama-bpe", True), ("qwen2", False), ("tekken", True), ("gpt-2", False)])
def test_byte_level(tmp_path, name, begins):
    made = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    split = _SPLITS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), byte_level]) if split else byte_level
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    made.save(str(tmp_path / "made.json"))
    merges = [" ".join(merge) for merge in __import__("json").loads((tmp_path / "made.json").read_text())["model"][
        "merges"]]
    save(tmp_path / "model.gguf", "gpt2", made, tokenizer_pre=name, token_merges=merges)
    found = load_tokenizer(str(tmp_path / "model.gguf"))
    first = [made.token_to_id("<s>")] if begins else []
    for text in (*TEXTS, "a<s>b"):
        assert found.encode(text) == first + made.encode(text).ids
        assert found.decode(made.encode(text).ids, skip_special_tokens=False) == text
    assert found.special_ids == {made.token_to_id("<s>")}
    assert found.render_chat([{"role": "user", "content": "hi"}], tools=None, continue_final_message=False,
                             options={}) == "<s>hi"


def test_sentence_piece(tmp_path):
    """Ids follow the scores, as in the vocabularies of Llama 2."""
    pieces = ["▁", "t", "h", "e", "r", "i", "v", "s", "a", "th", "▁th", "▁the", "er", "riv", "river", "ri", "▁river"]
    tokens = ["<unk>", "<s>", *(f"<0x{value:02X}>" for value in range(256)), *pieces]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("e", "r"), ("ri", "v"), ("r", "i"), ("riv", "er"),
              ("▁", "river")]
    order = [next(pair for pair in merges if "".join(pair) == piece) for piece in pieces
             if piece in {"".join(pair) for pair in merges}]
    made = Tokenizer(models.BPE(vocabulary, order, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>")])
    save(tmp_path / "model.gguf", "llama", made, token_scores=[-float(index) for index in range(len(tokens))],
         unk_token_id=0)
    found = load_tokenizer(str(tmp_path))
    for text in ("the river is", "thé 🙂", "r  th"):
        assert found.encode(text) == [1, *made.encode(text).ids]
        assert found.decode(found.encode(text), skip_special_tokens=True) == text


def test_other_tokenizers_are_refused(tmp_path):
    made = Tokenizer(models.BPE({"<s>": 0, "a": 1}, []))
    for kind, name, error in (("bert", "default", "of the kind 'bert'"), ("gpt2", "chameleon", "as 'chameleon'")):
        save(tmp_path / "model.gguf", kind, made, tokenizer_pre=name)
        with pytest.raises(ConfigError, match=f"{error}, which is not supported: give the folder .* --tokenizer-path"):
            load_tokenizer(str(tmp_path / "model.gguf"))
