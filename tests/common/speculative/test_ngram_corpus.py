"""NGRAM drafts from texts that an operator gives it."""

from __future__ import annotations

import json

import pytest

from baton.common.api.drafts import Drafts
from baton.common.api.errors import ConfigError
from baton.common.api.namespace import Namespace
from baton.common.config.server import ModelArgs
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.speculative.ngram import NgramProposer
from baton.common.speculative.ngram_corpus import NgramCorpus, read_corpus
from baton.tests.common.speculative.test_ngram_index import Request
from baton.tests.helpers.acceptance_parity import BASE, ROOMY, questions
from baton.tests.helpers.flag_engine import FlagEngine
from baton.tests.helpers.grammar_engine import tokenizer


def args_of(path=None, **flags) -> SpeculativeArgs:
    return SpeculativeArgs(speculative_algorithm="NGRAM", speculative_ngram_external_corpus_path=path and str(path),
                           **flags)


def propose(proposer, *reqs, limit=4):
    return [found and found.tokens for found in proposer.propose(reqs, [limit] * len(reqs))]


def test_what_followed_in_documents_is_drafted_for_all_namespaces():
    args = args_of()
    proposer = NgramProposer(args, NgramCorpus(args, [[*range(50, 58)], [*range(3000, 6000)], [7]]))
    assert propose(proposer, Request([1, 50, 51]), Request([2, 5000], Namespace("salt")), Request([57]), Request([7])
                   ) == [(52, 53, 54, 55), (5001, 5002, 5003, 5004), None, None]
    assert propose(proposer, Request([5998])) == [(5999,)]


def test_the_longest_match_counts():
    args = args_of()
    proposer = NgramProposer(args, NgramCorpus(args, [[1, 2, 3, 4, 10, 11, 12, 13]]))
    assert propose(proposer, Request([4, 20, 21, 22, 23, 8, 4])) == [(20, 21, 22, 23)], "equal: the request's own"
    assert propose(proposer, Request([4, 20, 21, 22, 23, 2, 3, 4])) == [(10, 11, 12, 13)]
    tree = args_of(speculative_ngram_max_bfs_breadth=4)
    [found] = NgramProposer(tree, NgramCorpus(tree, [[4, 10], [4, 11]])).propose([Request([4, 20, 4])], [3])
    assert isinstance(found, Drafts) and {10, 11, 20} == set(found.tokens)


def test_a_file_of_texts_is_worth_drafts(tmp_path):
    asked = questions(4)
    plain = FlagEngine(*BASE, *ROOMY).answers(asked)
    path = tmp_path / "texts.jsonl"
    texts = [tokenizer().decode(answer.tokens, skip_special_tokens=True) for answer in plain]
    path.write_text("\n".join(map(json.dumps, texts)) + "\n\n")
    steps = []
    for flags in ((), ("--speculative-ngram-external-corpus-path", str(path))):
        answers = FlagEngine(*BASE, *ROOMY, "--speculative-algorithm", "NGRAM", *flags).answers(asked)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        steps.append(sum(len(answer.verified) for answer in answers))
    assert steps[1] < 0.5 * steps[0]


@pytest.mark.parametrize(("content", "most", "sentence"), [
    (None, 100, "Cannot read --speculative-ngram-external-corpus-path"),
    ('"one"\n{"text": "two"}\n', 100, "line 2: each line must be a JSON string"),
    ('"one two three four five six seven"\n', 3, "has more than 3 tokens: raise --speculative-ngram-external-corpus-m"),
])
def test_files_that_cannot_be_read(tmp_path, content, most, sentence):
    path = tmp_path / "texts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        read_corpus(args_of(path, speculative_ngram_external_corpus_max_tokens=most), ModelArgs(model_path="tinychat"))
