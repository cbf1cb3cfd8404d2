"""Settings of ``bench_calibrate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...common.api.errors import ConfigError
from ...common.bench.serving_args import TargetArgs
from ...common.config.cli import flag, nested
from ...common.config.rules import at_least


@dataclass(frozen=True)
class CalibrateArgs:
    output_file: str = flag(required=True, help="the cost table to write")
    name: str | None = flag(None, help="the table's name (default: the file's)")
    description: str = flag("", help="the machine and the server's flags, for whoever reads the table")
    max_batch: int = flag(256, help="most requests that decode together")
    max_context: int = flag(16384, help="longest prompt, in tokens")
    repeats: int = flag(4, help="times that each prompt alone is measured")
    gpus: int = flag(1, help="GPUs that the server takes")
    layer_groups: int = flag(2, help="layer groups of a page, as the prefill server's log names them")
    pair_url: str | None = flag(None, help=(
        "a router in front of one prefill and one decode server of the same kind, for the costs of transfers"))
    prefill_url: str | None = flag(None, help="that prefill server, whose metrics count bytes and seconds of writes")
    samples_file: str | None = flag(None, help="write the single measurements to this file, as JSON")
    seed: int = flag(0, help="of the prompts' tokens")

    def __post_init__(self) -> None:
        at_least(self, 1, "max_batch", "repeats", "gpus", "layer_groups")
        at_least(self, 64, "max_context")
        if (self.pair_url is None) != (self.prefill_url is None):
            raise ConfigError("--pair-url and --prefill-url go together: the costs of transfers need both.")

    @property
    def table_name(self) -> str:
        return self.name or Path(self.output_file).stem


@dataclass(frozen=True)
class Calibrate:
    """The configuration of ``bench_calibrate``."""

    calibrate: CalibrateArgs
    target: TargetArgs = nested(omit=dict.fromkeys((
        "backend", "tokenizer", "tokenize_prompt", "disable_ignore_eos", "return_logprob", "disable_stream",
        "extra_request_body"), "every measurement has its own"))


def sizes(largest: int, *steps: int) -> list[int]:
    """Returns the ``steps`` below ``largest``, and ``largest``."""
    return [*(step for step in steps if step < largest), largest]
