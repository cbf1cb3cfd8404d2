"""A chat model small enough to ship: the default of ``launch_cluster``, and what the tests ask.

The tasks that it was taught, and the scripts that trained it, are in ``tests/tinychat/``.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""Directory of the packaged checkpoint: a Hugging Face ``Qwen3ForCausalLM`` in bf16, with its tokenizer."""

_DRAFTS = ("eagle3", "nextn", "draft")
DRAFT_MODELS: dict[str, Path] = {f"tinychat-{name}": Path(__file__).parent / name for name in _DRAFTS}
"""Directories of its draft models by name, without a tokenizer: an EAGLE3 head, a layer of multi-token prediction, and
a smaller model of the same vocabulary."""


def packaged_checkpoint(name: str) -> Path | None:
    """Returns the directory of a packaged checkpoint, the chat model or one of its draft models; None for other
    names."""
    return CHECKPOINT if name == "tinychat" else DRAFT_MODELS.get(name)
