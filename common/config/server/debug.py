"""Flags that show what a model computes: dumps of its tensors, and what profilers see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from ...api.errors import ConfigError
from ..cli import flag
from ..rules import Rule, ServerRule


class HookSpec(msgspec.Struct, frozen=True):
    """A hook of --forward-hooks: ``hook_factory(config)``, by its import path, makes what is called after the modules
    whose names match one of ``target_modules``."""

    target_modules: tuple[str, ...]
    hook_factory: str
    name: str = ""
    config: dict[str, Any] = {}


@dataclass(frozen=True)
class DebugArgs:
    debug_tensor_dump_output_folder: str | None = flag(None, help=(
        "dump what the model's modules compute: each step writes FOLDER/TP0_PP0_Rank0_pid1/Pass00000.pt, where a rank "
        "keeps tensors by their modules' names. Kernels are launched one by one"))
    debug_tensor_dump_layers: tuple[int, ...] = flag((), help="layers to dump, instead of all")
    debug_tensor_dump_prefill_only: bool = flag(False, help="dump only steps that compute prompts")
    debug_tensor_dump_input_file: str | None = flag(None, help=(
        "compute the prompts of this file at start, and dump that step first: a .npy file of token ids, or a "
        "PassNNNNN.pt file of a dump of whole prompts, with whose tensors those of this model are then compared"))
    debug_tensor_dump_inject: bool = flag(False, help=(
        "give each layer its input from the dump of --debug-tensor-dump-input-file, so that layers are compared one by "
        "one"))
    forward_hooks: str | None = flag(None, metavar="JSON", help=(
        "functions that see, or replace, what modules compute: a JSON list of {\"target_modules\": "
        "[\"model.layers.*.mlp\"], \"hook_factory\": \"package.module:make\", \"config\": {}}. Kernels are launched "
        "one by one"))
    enable_layerwise_nvtx_marker: bool = flag(False, help=(
        "show the modules of each layer to Nsight as NVTX ranges; a step that is a CUDA graph has one range alone "
        "(--disable-cuda-graph)"))
    enable_profile_cuda_graph: bool = flag(False, help=(
        "profile the capture of CUDA graphs: a table by batch size in the log, and a trace in the folder of "
        "/start_profile"))

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.debug.debug_tensor_dump_output_folder is None and (
            c.debug.debug_tensor_dump_layers or c.debug.debug_tensor_dump_prefill_only
            or c.debug.debug_tensor_dump_input_file is not None),
            "--debug-tensor-dump-layers, --debug-tensor-dump-prefill-only and --debug-tensor-dump-input-file need "
            "--debug-tensor-dump-output-folder."),
        Rule(lambda c: c.debug.debug_tensor_dump_inject and not (
            c.debug.debug_tensor_dump_input_file or "").endswith(".pt"),
             "--debug-tensor-dump-inject takes the tensors of a dump: give its PassNNNNN.pt file with "
             "--debug-tensor-dump-input-file."),
        Rule(lambda c: c.debug.debug_tensor_dump_input_file is not None and c.parallel.pp_size > 1,
             "--debug-tensor-dump-input-file is computed by ranks that have all layers: leave --pp-size out."),
        Rule(lambda c: c.debug.debug_tensor_dump_output_folder is not None and c.data_parallel.enable_two_batch_overlap,
             "--debug-tensor-dump-output-folder dumps whole steps: leave --enable-two-batch-overlap out."),
        Rule(lambda c: c.debug.enable_profile_cuda_graph and not c.captures_graphs,
             "--enable-profile-cuda-graph profiles the capture of CUDA graphs: leave --disable-cuda-graph and "
             "--debug-tensor-dump-output-folder out."),
    )

    @property
    def hooks(self) -> list[HookSpec]:
        """The hooks of --forward-hooks; raises ConfigError."""
        try:
            return [] if self.forward_hooks is None else msgspec.json.decode(self.forward_hooks, type=list[HookSpec])
        except msgspec.DecodeError as error:
            raise ConfigError(f"--forward-hooks must be a JSON list of objects with target_modules and hook_factory: "
                              f"{error}.") from None

    def __post_init__(self) -> None:
        _ = self.hooks  # Raises for what it cannot read.
        if (least := min(self.debug_tensor_dump_layers, default=0)) < 0:
            raise ConfigError(f"--debug-tensor-dump-layers must be 0 or more, not {least}.")
