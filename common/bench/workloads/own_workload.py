"""The workload of an engine in this process: prompts of its model's vocabulary."""

from __future__ import annotations

from ...config.server import ModelArgs
from ...models.registry import load_model_spec
from ...tokenizer.tokenizer import load_tokenizer
from .dataset_args import DatasetArgs
from .datasets import make_workload
from .vocabulary import Vocabulary
from .workload import Conversation


def own_workload(dataset: DatasetArgs, model: ModelArgs) -> list[Conversation]:
    """``make_workload`` with prompts in token ids. Raises ConfigError."""
    size = load_model_spec(model).vocab_size
    if dataset.dataset_name == "random-ids":
        return make_workload(dataset, Vocabulary(size, None, as_ids=True))
    tokenizer = load_tokenizer(model.tokenizer_path or model.model_path, model.revision,
                               trust_remote_code=model.trust_remote_code, download_dir=model.download_dir)
    return make_workload(dataset, Vocabulary(min(size, tokenizer.size), tokenizer, as_ids=True))
