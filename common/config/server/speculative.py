"""Flags of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ...registry import Choices, Registry
from ..cli import flag
from ..load_format import LOAD_FORMATS
from ..quantization import QUANTIZATIONS
from ..rules import Rule, ServerRule, at_least, check_own_rules
from .cache import KVCacheDtype
from .kernels import ATTENTION_CHOICES
from .simulated_acceptance import parse_shares

if TYPE_CHECKING:
    from ...speculative.base import Algorithm

SPECULATIVE_ALGORITHMS: Registry[Algorithm] = Registry("speculative algorithm", "baton.common.speculative",
                                                       group="baton.speculative")
"""Traits: "device" for algorithms with a draft model, "shifted" where its keys and values depend on the next token,
"draft_path" where it needs a checkpoint of its own, "token_map" where its vocabulary can be restricted; the kinds of
checkpoints that it reads, of ``draft_kind.KINDS``."""

_DEFAULT_STEPS = {"NGRAM": 11}
_OTHER_STEPS = 3
_TREE_DRAFTS = 7
_MAX_TREE_ROWS = 63
"""Bits of the words by which rows of a tree say what they see."""


@dataclass(frozen=True)
class SpeculativeArgs:
    """``speculative_num_draft_tokens`` counts a request's rows in a step, as SGLang does: its newest token and its
    drafts."""

    speculative_algorithm: str | None = flag(None, choices=Choices.of(SPECULATIVE_ALGORITHMS), help=(
        "draft tokens that one step then verifies: EAGLE, EAGLE3 and NEXTN by layers that read the model's hidden "
        "states, STANDALONE by a smaller model, NGRAM by what followed the same tokens before"))
    speculative_draft_model_path: str | None = flag(None, names=("--speculative-draft-model",), help=(
        "the draft model's folder or name; NEXTN takes its layers from the model's own checkpoint by default"))
    speculative_draft_model_revision: str | None = flag(None, help="its revision, of a name on the Hugging Face hub")
    speculative_draft_model_quantization: str | None = flag(
        None, choices=Choices.of(QUANTIZATIONS, others=("unquant",)), help=(
            "format of the linear layers of --speculative-draft-model-path, as --quantization's; by default, and with "
            "unquant, the checkpoint's"))
    speculative_draft_load_format: str | None = flag(None, choices=Choices.of(LOAD_FORMATS), help=(
        "source of the weights of --speculative-draft-model-path, as --load-format's (default: auto, or dummy where "
        "the model's are)"))
    speculative_draft_attention_backend: str | None = flag(None, choices=ATTENTION_CHOICES, help=(
        "the draft model's attention backend, for prompts and decode steps (default: the model's)"))
    speculative_draft_kv_cache_dtype: KVCacheDtype | None = flag(None, help=(
        "type of the draft model's KV cache, auto that of its weights (default: --kv-cache-dtype)"))
    speculative_num_steps: int | None = flag(None, help=(
        "passes of the draft model in a step, each of which drafts the next token of a request (default: 3, or one "
        "less than the rows)"))
    speculative_eagle_topk: int | None = flag(None, help=(
        "tokens that each pass of the draft model proposes for a place; above 1 drafts are trees (default: 1)"))
    speculative_num_draft_tokens: int | None = flag(None, help=(
        "most rows of a request in a step: its newest token and its drafts (default: one more than the passes, which "
        "is what chains of a draft model always have; 8 for trees, 12 for NGRAM)"))
    speculative_accept_threshold_single: float = flag(1.0, help=(
        "accept a draft whose probability is at least this; below 1 sampled output is not the model's own any more"))
    speculative_accept_threshold_acc: float = flag(1.0, help=(
        "accept some draft after a token with the sum of their probabilities divided by this; below 1 sampled output "
        "is not the model's own any more"))
    speculative_token_map: str | None = flag(None, help=(
        "a file of token ids, to which the draft model's vocabulary is restricted (FR-Spec)"))
    speculative_attention_mode: Literal["prefill", "decode"] = flag("decode", help=(
        "the attention kernels that verify drafts: those of decode steps for a few rows of each request, or those of "
        "prompts, which trees do not use"))
    speculative_ngram_min_match_window_size: int = flag(1, help=(
        "fewest tokens at the end that must have occurred before for NGRAM to draft"))
    speculative_ngram_max_match_window_size: int = flag(12, help="most tokens at the end that NGRAM looks for")
    speculative_ngram_min_bfs_breadth: int = flag(1, help=(
        "tokens that NGRAM drafts for one place after the longest match: 1 drafts a chain"))
    speculative_ngram_max_bfs_breadth: int = flag(1, help=(
        "tokens that NGRAM drafts for one place after the shortest match; above 1 drafts are trees"))
    speculative_ngram_match_type: Literal["BFS", "PROB"] = flag("BFS", help=(
        "the drafts of NGRAM's trees: level by level, or those that occurred most often"))
    speculative_ngram_max_trie_depth: int = flag(18, names=("--speculative-ngram-branch-length",), help=(
        "most drafts of NGRAM that follow each other"))
    speculative_ngram_capacity: int = flag(10_000_000, help=(
        "entries of NGRAM's index, of 8 bytes, of the tokens of all requests; 0 looks in the request's own only"))
    speculative_ngram_external_corpus_path: str | None = flag(None, metavar="FILE", help=(
        "texts that NGRAM drafts from as well, for all requests: a JSON string in each line"))
    speculative_ngram_external_corpus_max_tokens: int = flag(10_000_000, help=(
        "most tokens of that file; more end the start"))
    speculative_adaptive: bool = flag(False, help=(
        "choose the number of drafts by the batch, the measured cost of a step and the running acceptance"))
    speculative_simulate_acceptance: str | None = flag(None, metavar="LENGTH", help=(
        "accept drafts at random, so that a step yields this many tokens in the mean: for measurements with dummy "
        "weights; or the share of accepted drafts by position, 0.83,0.6,0.45"))

    own_flag_rules: ClassVar[tuple[Rule[SpeculativeArgs], ...]] = (
        Rule(lambda c: not all(0 < threshold <= 1 for threshold in c.accept_thresholds),
             "--speculative-accept-threshold-single and --speculative-accept-threshold-acc must be above 0 and at most "
             "1."),
        Rule(lambda c: not 1 <= c.speculative_ngram_min_match_window_size <= c.speculative_ngram_max_match_window_size,
             "--speculative-ngram-min-match-window-size must be between 1 and "
             "--speculative-ngram-max-match-window-size, not {speculative_ngram_min_match_window_size}."),
        Rule(lambda c: not 1 <= c.speculative_ngram_min_bfs_breadth <= c.speculative_ngram_max_bfs_breadth,
             "--speculative-ngram-min-bfs-breadth must be between 1 and --speculative-ngram-max-bfs-breadth, not "
             "{speculative_ngram_min_bfs_breadth}."),
        Rule(lambda c: c.speculative_ngram_max_bfs_breadth > 1 and not c.speculative_ngram_capacity,
             "--speculative-ngram-max-bfs-breadth {speculative_ngram_max_bfs_breadth} needs the index of all requests: "
             "leave --speculative-ngram-capacity out."),
        Rule(lambda c: c.speculative_ngram_external_corpus_path is not None and (
            c.speculative_algorithm != "NGRAM" or not c.speculative_ngram_capacity),
            "--speculative-ngram-external-corpus-path needs --speculative-algorithm NGRAM and its index: set the one, "
            "and leave --speculative-ngram-capacity out."),
        Rule(lambda c: c.has("draft_path") and c.speculative_draft_model_path is None,
             "--speculative-algorithm {speculative_algorithm} needs the folder or the name of its draft model: set "
             "--speculative-draft-model-path."),
        Rule(lambda c: c.speculative_draft_model_path is not None and not c.is_device,
             "--speculative-draft-model-path is for EAGLE, EAGLE3, NEXTN and STANDALONE: name one of them by "
             "--speculative-algorithm, or leave it out."),
        Rule(lambda c: c.draft_format is not None and c.speculative_draft_model_path is None,
             "--speculative-draft-model-quantization and --speculative-draft-load-format are for a draft model's own "
             "checkpoint: name it by --speculative-draft-model-path (of NEXTN it may be the model's)."),
        Rule(lambda c: c.speculative_draft_load_format in ("remote_instance", "sharded_state"),
             "--speculative-draft-load-format {speculative_draft_load_format} has the weights of a whole server: use a "
             "format that reads the draft model's checkpoint."),
        Rule(lambda c: not c.is_device and (
            c.speculative_draft_attention_backend or c.speculative_draft_kv_cache_dtype),
            "--speculative-draft-attention-backend and --speculative-draft-kv-cache-dtype are for EAGLE, EAGLE3, NEXTN "
            "and STANDALONE: name one of them by --speculative-algorithm, or leave them out."),
        Rule(lambda c: c.speculative_token_map is not None and not c.has("token_map"),
             "--speculative-token-map restricts the vocabulary of EAGLE, NEXTN and STANDALONE (EAGLE3's heads have one "
             "of their own): name one of them by --speculative-algorithm, or leave it out."),
        Rule(lambda c: c.speculative_algorithm is None and c.speculative_simulate_acceptance is not None,
             "--speculative-simulate-acceptance needs drafts: set --speculative-algorithm too."),
        Rule(lambda c: c.speculative_algorithm is None and c.speculative_adaptive,
             "--speculative-adaptive needs drafts: set --speculative-algorithm too."),
        Rule(lambda c: c.topk > 1 and c.speculative_adaptive,
             "--speculative-adaptive chooses the length of chains: drop --speculative-eagle-topk."),
        Rule(lambda c: c.topk > 1 and not c.is_device,
             "--speculative-eagle-topk is for EAGLE, EAGLE3, NEXTN and STANDALONE: name one of them by "
             "--speculative-algorithm, or leave it out; NGRAM's trees are --speculative-ngram-max-bfs-breadth's."),
        Rule(lambda c: c.topk > 1 and c.num_drafts > c.topk + (c.num_steps - 1) * c.topk**2,
             "--speculative-num-draft-tokens {speculative_num_draft_tokens} are more rows than --speculative-num-steps "
             "passes of --speculative-eagle-topk {speculative_eagle_topk} propose: lower it, or raise the others."),
        Rule(lambda c: c.drafts_trees and max(c.num_drafts + 1, c.room_for_drafts) > _MAX_TREE_ROWS,
             "Trees of drafts have at most 63 rows, and at most 63 that are expanded: lower "
             "--speculative-num-draft-tokens, --speculative-num-steps or --speculative-eagle-topk."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.speculative.speculative_adaptive and c.data_parallel.enable_dp_attention,
             "--speculative-adaptive measures steps of one attention group: leave it out with --enable-dp-attention."),
        Rule(lambda c: c.speculative.speculative_algorithm and (
            c.model.is_embedding or not (c.role.decodes or c.speculative.is_device)),
            "--speculative-algorithm is for servers that decode; leave it out here."),
        Rule(lambda c: c.speculative.speculative_algorithm and c.parallel.pp_size > 1,
             "--speculative-algorithm does not work across the stages of --pp-size: leave one of them out."),
        Rule(lambda c: c.speculative.drafts_trees and c.data_parallel.enable_two_batch_overlap,
             "--enable-two-batch-overlap does not cut trees of drafts: drop it, or --speculative-eagle-topk and "
             "--speculative-ngram-max-bfs-breadth."),
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "speculative_num_steps", "speculative_eagle_topk", "speculative_ngram_max_trie_depth")
        at_least(self, 0, "speculative_ngram_capacity")
        at_least(self, 1, "speculative_ngram_external_corpus_max_tokens")
        at_least(self, 2, "speculative_num_draft_tokens")
        check_own_rules(self)
        _ = self.simulated_acceptance  # Raises for what it cannot read.

    @property
    def simulated_acceptance(self) -> tuple[float, ...] | None:
        """The share of accepted drafts by position where acceptance is simulated, None where it is real."""
        given = self.speculative_simulate_acceptance
        return None if given is None else parse_shares(given, self.num_drafts)

    @property
    def accept_thresholds(self) -> tuple[float, float]:
        return self.speculative_accept_threshold_single, self.speculative_accept_threshold_acc

    @property
    def draft_format(self) -> str | None:
        """Flags by which the draft model's checkpoint is read."""
        return self.speculative_draft_load_format or self.draft_quantization

    @property
    def draft_quantization(self) -> str | None:
        """The draft model's ``--quantization``."""
        given = self.speculative_draft_model_quantization
        return None if given == "unquant" else given

    def draft_cache_dtype(self, cache_dtype: KVCacheDtype) -> KVCacheDtype:
        """The draft model's ``--kv-cache-dtype``, where the model's is ``cache_dtype``."""
        return self.speculative_draft_kv_cache_dtype or cache_dtype

    @property
    def is_device(self) -> bool:
        """True where a draft model drafts, on the device."""
        return self.has("device")

    @property
    def is_shifted(self) -> bool:
        """True where the draft's keys and values at a position depend on the token after it."""
        return self.has("shifted")

    def has(self, trait: str) -> bool:
        """Returns True if the algorithm is registered with this trait; imports nothing."""
        return self.speculative_algorithm is not None and SPECULATIVE_ALGORITHMS.has(self.speculative_algorithm, trait)

    @property
    def num_steps(self) -> int:
        """Passes of the draft model, or the most tokens in a chain."""
        if self.speculative_num_steps is not None:
            return self.speculative_num_steps
        if self.speculative_num_draft_tokens is not None and self.topk == 1:
            return self.speculative_num_draft_tokens - 1
        return _DEFAULT_STEPS.get(self.speculative_algorithm or "", _OTHER_STEPS)

    @property
    def topk(self) -> int:
        return self.speculative_eagle_topk or 1

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request in a step: a draft model's chain has one of each pass."""
        rows = self.speculative_num_draft_tokens
        if self.topk > 1 and rows is None:
            return min(_TREE_DRAFTS, self.topk + (self.num_steps - 1) * self.topk**2)
        if rows is None or (self.is_device and self.topk == 1):
            return self.num_steps
        return rows - 1

    @property
    def drafts_trees(self) -> bool:
        """True where drafts may be trees."""
        if self.is_device:
            return self.topk > 1
        return self.speculative_algorithm == "NGRAM" and self.speculative_ngram_max_bfs_breadth > 1

    @property
    def max_depth(self) -> int:
        """Most drafts that follow each other."""
        if self.speculative_algorithm == "NGRAM":
            return min(self.num_drafts, self.speculative_ngram_max_trie_depth)
        return min(self.num_drafts, self.num_steps)

    @property
    def room_for_drafts(self) -> int:
        """Slots in which the passes of a draft model store a request's newest token and what they expand."""
        return self.num_drafts if self.topk == 1 else max(self.num_drafts, self.topk * (self.num_steps - 1) + 1)
