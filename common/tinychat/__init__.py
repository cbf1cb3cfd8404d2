"""A chat model small enough to ship: the default of ``launch_cluster``, and what the tests ask.

The tasks that it was taught, and the scripts that trained it, are in ``tests/tinychat/``.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""Directory of the packaged checkpoint: a Hugging Face ``Qwen3ForCausalLM`` in bf16, with its tokenizer."""


def packaged_checkpoint(name: str) -> Path | None:
    """Returns the folder of a packaged checkpoint, the chat model or one of its draft models; None for other names."""
    return _PACKAGED.get(name)


_PACKAGED = {"tinychat": CHECKPOINT} | {f"tinychat-{draft}": CHECKPOINT.parent / draft
                                        for draft in ("eagle3", "nextn", "draft")}
