"""A chat model small enough to ship: its checkpoint, the tasks it was taught, and the scripts that made it.

Every question of ``tasks`` has exactly one right answer, so a test that asks one through a serving
stack learns whether the cache behind the answer was intact. Importing this package costs nothing:
``tasks`` needs the standard library alone, ``train`` and ``tokenizer`` need the ``engine`` extra.
"""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""Directory of the packaged checkpoint: a Hugging Face ``Qwen3ForCausalLM`` in bf16, with its tokenizer."""
