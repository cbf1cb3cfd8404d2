"""A chat model small enough to ship: the default of ``launch_cluster``, and what the tests ask.

The tasks that it was taught, and the scripts that trained it, are in ``tests/tinychat/``.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""Directory of the packaged checkpoint: a Hugging Face ``Qwen3ForCausalLM`` in bf16, with its tokenizer."""
