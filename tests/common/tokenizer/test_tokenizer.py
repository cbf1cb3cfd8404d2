from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.api.errors import ConfigError, InvalidRequest
from baton.common.api.messages import Finish
from baton.common.api.sampling import SamplingParams
from baton.common.tokenizer.stop import StopMatcher
from baton.common.tokenizer.text_stream import Detokenizer, TextStream
from baton.common.tokenizer.token_bytes import byte_alphabet, token_decoder
from baton.common.tokenizer.tokenizer import Tokenizer, load_tokenizer
from baton.tests.helpers.fake_engine import EOS, make_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"))))


def one_byte(token: int) -> bytes:
    return bytes([token])


# ---------------------------------------------------------------- detokenizer


@given(st.text(), st.data())
def test_valid_text_comes_out_whole_and_never_half(text: str, data: st.DataObject) -> None:
    raw = list(text.encode("utf-8"))
    detokenizer = Detokenizer(one_byte)
    out = ""
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        out += detokenizer.push(raw[:size])
        assert text.startswith(out)
        raw = raw[size:]
    assert out + detokenizer.finish() == text


@given(st.binary())
def test_any_bytes_decode_as_python_does(raw: bytes) -> None:
    detokenizer = Detokenizer(one_byte)
    pieces = [detokenizer.push([byte]) for byte in raw]
    assert "".join(pieces) + detokenizer.finish() == raw.decode("utf-8", "replace")


def test_incomplete_character_waits_and_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(one_byte)
    assert detokenizer.push(list("€".encode())[:2]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


@settings(max_examples=50)
@given(text=st.text(max_size=30))
def test_pieces_agree_with_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8")


def test_byte_alphabet_is_a_bijection() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_sentencepiece_pieces() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "▁the": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4, "ing": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    detokenizer = Detokenizer(token_decoder(hf))
    assert [detokenizer.push([token]) for token in (1, 2, 3, 4, 5)] == [" the", "", "", "€", "ing"]


def test_tokens_of_another_decoder_are_decoded_after_an_anchor() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordPiece({"a": 0, "walk": 1, "##ing": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    piece = token_decoder(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert (piece(1), piece(2)) == (b" walk", b"ing")


# ---------------------------------------------------------------- stop strings


def earliest_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The specification: end and text of the stop string that is completed first, the longest of several."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(found)[0], min(found)[2]) if found else None


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(st.text("ab", max_size=30), STOPS, st.booleans(), st.data())
def test_stop_matches_do_not_depend_on_the_cuts(text: str, stops: list[str], trim: bool,
                                                data: st.DataObject) -> None:
    matcher = StopMatcher(stops, trim)
    expected = earliest_end(text, stops)
    certain = text if expected is None else text[: expected[0] - (len(expected[1]) if trim else 0)]
    out, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        out += matcher.push(rest[:size])
        assert certain.startswith(out)
        rest = rest[size:]
    assert out + matcher.finish() == certain
    assert matcher.matched == (expected[1] if expected else None)


def test_no_more_than_a_possible_stop_is_buffered() -> None:
    matcher = StopMatcher(["END", "NEVER"])
    assert matcher.push("some EN") == "some "
    assert matcher.push("T and N") == "ENT and "
    assert matcher.finish() == "N"
    assert matcher.may_match and not StopMatcher([]).may_match


def earliest_match(text: str, pattern: str) -> tuple[int, int] | None:
    """The specification: of the matches that end first, the longest one, as its begin and its end."""
    compiled = re.compile(pattern)
    return next(((start, end) for end in range(1, len(text) + 1) for start in range(end)
                 if compiled.fullmatch(text, start, end)), None)


@pytest.mark.parametrize("pattern", [
    "and|or", r"[.!?]\s*$", "a+b", "(ab|ba){2,3}c?", "a.*?c", "^b+", r"(?m)^c\n", "(?i)A[B-C]", r"[^ab\s]{2}", r"\w\d",
    "(a?){3}b", "(a|b)*c", r"\Aab|ca\Z", "(a+)+c", r"(?s)a.b", r"(?i:B)a"])
@given(text=st.text("abc \n.1B", max_size=24), data=st.data(), trim=st.booleans())
@settings(max_examples=60)
def test_stop_expressions_match_as_re_does(pattern: str, text: str, data: st.DataObject, trim: bool) -> None:
    matcher = StopMatcher([], trim, [pattern])
    expected = earliest_match(text, pattern)
    certain = text if expected is None else text[:expected[0 if trim else 1]]
    out, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        out += matcher.push(rest[:size])
        assert certain.startswith(out), "text was told that turned out to be a match"
        rest = rest[size:]
    assert out + matcher.finish() == certain
    assert matcher.matched == (pattern if expected else None)


@pytest.mark.parametrize(("pattern", "text", "certain"), [
    ("and|or", "x and or", "x "), (r"[.!?]\s*$", "Hm.", "Hm"), ("a.*?c", "b a\n abc", "b a\n "), ("^b+", "ab", None),
    ("^b", "b", ""), (r"(?m)^c\n", "bc\nc\n", "bc\n"), ("(?i)A[B-C]", "xaBc", "x"), (r"[^ab\s]{2}", "a1b11", "a1b"),
    (r"\W\d", "1 2", "1"), (r"(?a)\d", "٣3", "٣"), ("[^a]b", "ab1b", "ab"), ("x[b-d]", "xaxc", "xa"),
    ("a[^b]", "aba\n", "ab"), (r"[\S]1", " 11", " "), ("(?s)a.b", "a\nb", ""), ("(?i:B)a", "ABa", "A"),
    ("[^\n]", "\n1", "\n"), ("a{1,2}b", "xaab", "x"), ("(?i)ß", "xß", "x"), ("a[^b]c", "abcadc", "abc")])
def test_stop_expressions_end_the_text_before_the_match(pattern: str, text: str, certain: str | None) -> None:
    whole, split = StopMatcher([], expressions=[pattern]), StopMatcher([], expressions=[pattern])
    expected = text if certain is None else certain
    assert whole.push(text) + whole.finish() == expected
    assert "".join(map(split.push, text)) + split.finish() == expected
    assert whole.matched == split.matched == (None if certain is None else pattern)


@pytest.mark.parametrize(("stops", "text", "certain"), [
    (["END", "EN"], "some END", "some "), (["aab"], "aaab", "a"), (["abab"], "ababab", ""), (["abac"], "ababac", "ab"),
    (["x"], "abc", "abc"), ([], "abc", "abc"), (["cb", "abcb"], "abcb", "")])
def test_stop_strings_end_the_text_before_the_match(stops: list[str], text: str, certain: str) -> None:
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.push, text)) + matcher.finish() == certain
    assert (matcher.matched is None) == (certain == text)
    assert matcher.matched is None or matcher.push("more") == ""


def test_stop_text_can_be_part_of_the_answer() -> None:
    matcher = StopMatcher(["END"], trim=False)
    assert matcher.push("some END and") == "some END"


def test_stop_expressions_cost_the_same_whatever_they_are() -> None:
    """Python's own matcher would take 2 to the power of 2,000 steps."""
    matcher = StopMatcher(["never"], expressions=["(a+)+c", "(a|aa|a?a)+d"])
    assert matcher.push("a" * 2000) == "" and matcher.push("b") == "a" * 2000 + "b"
    assert matcher.push("xaa") == "x" and matcher.push("c") == "" and matcher.matched == "(a+)+c"


@pytest.mark.parametrize("pattern, why", [
    ("(", "is no regular expression"), ("a*", "matches the empty text"), ("^", "matches the empty text"),
    (r"(a)\1", "backtracking"), ("(?=a)b", "backtracking"), ("(?<!a)b", "backtracking"), (r"\ba", "holds"),
    ("a$b", "before its end"), ("a{600}", "too large"), ("(a?){150}b", "too large"), ("(((a{9}){9}){9}){9}", "large"),
    ("(" * 500 + "a" + ")" * 500, "stop_regex"), ("a" * 1025, "1025 characters"), ("(?:){5000}a", "too large")])
def test_stop_expressions_that_cannot_be_followed(pattern: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        StopMatcher([], expressions=[pattern])
    assert refused.value.param == "stop_regex" and len(refused.value.message) < 300


# ---------------------------------------------------------------- a request's text


def stream(tokenizer: Tokenizer, text: str, *, finish: Finish, **sampling: object) -> tuple[str, str | None]:
    found = tokenizer.text_stream(SamplingParams(**sampling))  # type: ignore[arg-type]
    ids = [*tokenizer.encode(text), *([finish.matched] if finish.matched is not None else [])]
    out = "".join(found.push([token], None) for token in ids[:-1]) + found.push(ids[-1:], finish)
    return out, found.matched


def test_stop_string_across_tokens(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, "hello world é!", finish=Finish("length"), stop=("ld é",)) == ("hello wor", "ld é")
    kept = stream(tokenizer, "hello world é!", finish=Finish("length"), stop=("ld é",), no_stop_trim=True)
    assert kept == ("hello world é", "ld é")


def test_buffered_text_is_emitted_at_the_end(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, "hello wor", finish=Finish("length"), stop=("world",)) == ("hello wor", None)


def test_stop_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("z")[0]
    assert stream(tokenizer, "hello", finish=Finish("stop", EOS))[0] == "hello"
    assert stream(tokenizer, "hello", finish=Finish("stop", EOS), skip_special_tokens=False)[0] == "hello"
    assert stream(tokenizer, "hello", finish=Finish("stop", token))[0] == "hello"
    assert stream(tokenizer, "hello", finish=Finish("stop", token), no_stop_trim=True)[0] == "helloz"


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("hi")]
    for skip, expected in ((True, "hi"), (False, "<start>hi")):
        found: TextStream = tokenizer.text_stream(SamplingParams(skip_special_tokens=skip))
        assert found.push(ids, Finish("length")) == expected


# ---------------------------------------------------------------- loading, templates


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere"])
def test_missing_folder_is_one_sentence(path: str) -> None:
    with pytest.raises(ConfigError, match="no tokenizer folder"):
        load_tokenizer(path)


def test_folder_without_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_tokenizer(str(tmp_path))
    assert str(error.value).startswith(f"Cannot load a tokenizer from {tmp_path}") and "\n" not in str(error.value)


def test_code_of_a_checkpoint_runs_by_its_flag_alone(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("""
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    def encode(self, text, **options):
        return super().encode(text.lower(), **options)
""")
    plain = load_tokenizer(str(make_checkpoint(tmp_path / "plain")))
    own = load_tokenizer(str(folder), trust_remote_code=True)
    assert own.encode("HELLO world") == plain.encode("hello world") != plain.encode("HELLO world")
    with pytest.raises(ConfigError, match="is code that the checkpoint ships: give --trust-remote-code"):
        load_tokenizer(str(folder))


def test_template_file_replaces_the_checkpoints(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content | upper }}{% if shout %}!{% endif %}")
    text = tokenizer.with_chat_template(str(file)).render_chat(
        [{"role": "user", "content": "hi"}], tools=None, continue_final_message=False, options={"shout": True})
    assert text == "HI!"


def test_broken_template_files_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match="not valid jinja: line 1"):
        tokenizer.with_chat_template(str(file))
    with pytest.raises(ConfigError, match="Cannot read"):
        tokenizer.with_chat_template(str(tmp_path / "missing"))


def test_missing_template_and_rejected_messages(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bare = load_tokenizer(str(make_checkpoint(tmp_path, chat_template=None)))
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.render_chat([{"role": "user", "content": "hi"}], tools=None, continue_final_message=False, options={})
    with pytest.raises(InvalidRequest, match="No such role"):
        tokenizer.render_chat([{"role": "forbidden", "content": "hi"}], tools=None, continue_final_message=False,
                              options={})
    with pytest.raises(InvalidRequest, match="must not set 'tokenize'"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}], tools=None, continue_final_message=False,
                              options={"tokenize": True})


async def test_hopeless_text_is_refused_unread(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="10000000 characters"):
        await tokenizer.encode_many(["x" * 10_000_000], limit=512)
    assert await tokenizer.encode_many(["hello", "x" * 30_000], limit=100_000) == [
        tokenizer.encode("hello"), tokenizer.encode("x" * 30_000)]
