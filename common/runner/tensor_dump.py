"""Dumps of tensors: what the modules of a rank's model compute, each step of the engine in a file of its own.

Folders, files and names are those of SGLang's ``--debug-tensor-dump-output-folder``, so that what compares its dumps
reads these; modules have transformers' names.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..api.errors import ConfigError
from ..config.server import DebugArgs
from ..distributed.deferred_reduce import MaybeDeferred
from ..distributed.parallel import Parallel
from ..forward.forward_batch import ForwardBatch
from ..models.decoder.causal_lm import CausalLM
from ..models.decoder.module_calls import ModuleCall
from .tensor_input import INFO, TensorInput, differences, injected, log_differences

log = logging.getLogger("baton.dump")

_LAYER = re.compile(r"\blayers\.(\d+)\b")
_MLP = re.compile(r"(.*\blayers\.\d+)\.mlp")


class TensorDump:
    """Wraps the calls of the model's modules. From then on sums over ranks are computed where a module ends, not with
    the norm that follows, and the last layer computes all rows.

    A file is a dict: the inputs ``model.forward_batch_info.*``, and by the names of modules their outputs
    [T, ...], of some a list of tensors; ``model.layers.N`` is the sum of the residual after layer N.
    """

    def __init__(self, args: DebugArgs, model: CausalLM, num_layers: int, parallel: Parallel):
        """Raises ConfigError for a layer that the model does not have, and where the folder cannot be made."""
        assert args.debug_tensor_dump_output_folder is not None
        layers = args.debug_tensor_dump_layers or range(num_layers)
        if (last := max(layers)) >= num_layers:
            raise ConfigError(f"--debug-tensor-dump-layers names layer {last}; the model's layers are 0 to "
                              f"{num_layers - 1}.")
        self._injects = args.debug_tensor_dump_inject
        self._of_rank = parallel.tp.rank == 0
        self._injected: Mapping[str, Any] | None = None  # of the step that is computed
        self._prefill_only = args.debug_tensor_dump_prefill_only
        self._folder = _make_folder(Path(args.debug_tensor_dump_output_folder).expanduser(), parallel)
        self._writes = True
        self._num_passes = 0
        self._tensors: dict[str, Any] | None = None  # of the step that is recorded
        self._residual: torch.Tensor | None = None
        model.trims_last_layer = False
        for call in model.module_calls():
            if (layer := _LAYER.search(call.names[0])) is None or int(layer[1]) in layers:
                call.wrap(lambda compute, call=call: self._recording(call, compute))  # type: ignore[misc]

    @contextmanager
    def recorded(self, batch: ForwardBatch, *, prefill: bool) -> Iterator[None]:
        """Writes what is computed in the context, a step of ``batch``; ``prefill``: it computes prompts."""
        if not self._writes or (self._prefill_only and not prefill):
            yield
            return
        self._tensors = _inputs(batch)
        try:
            yield
            self._write(self._tensors)
        finally:
            self._tensors = self._residual = None

    @contextmanager
    def compared(self, given: TensorInput, batch: ForwardBatch) -> Iterator[None]:
        """Writes what is computed in the context, a step of ``given``, and how far it is from the file's tensors.
        Raises ConfigError where they are not of the model's shapes."""
        if self._injects:
            self._injected = given.tensors
        self._tensors = _inputs(batch)
        try:
            yield
            if given.tensors:
                found = differences(self._tensors, given.tensors, of_rank=self._of_rank)
                log_differences(found)
                (self._folder / "Compared.json").write_text(json.dumps(
                    {each.name: {"largest_difference": each.largest, "largest_value": each.scale} for each in found},
                    indent=1) + "\n", encoding="utf-8")
            self._write(self._tensors)
        finally:
            self._tensors = self._residual = self._injected = None

    def _recording(self, call: ModuleCall, compute: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            if self._injected is not None:
                args, options = injected(call, self._injected, args, options)
            result = compute(*args, **options)
            if isinstance(result, MaybeDeferred) and not isinstance(result, torch.Tensor):
                result = result.reduce()  # in all steps: ranks of other attention groups may record theirs
            if self._tensors is not None:
                self._record(call, result, self._tensors)
            return result

        return recorded

    def _record(self, call: ModuleCall, result: Any, tensors: dict[str, Any]) -> None:
        if call.method in ("add_norm", "add_norm_as"):
            result, self._residual = result
        value = _on_host(result, call.one_sequence)
        if value is not None:
            tensors.update(dict.fromkeys(call.names, value))
        if self._residual is not None and (mlp := _MLP.fullmatch(call.names[0])):
            tensors[mlp[1]] = (self._residual + result).to("cpu", copy=True)

    def _write(self, tensors: dict[str, Any]) -> None:
        """Writes a file. A server whose disk is full goes on without dumps."""
        path = self._folder / f"Pass{self._num_passes:05d}.pt"
        try:
            torch.save(tensors, path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter
            log.error("No more tensors are dumped: %s cannot be written: %s", path, error)
            self._writes = False
        self._num_passes += 1


def _make_folder(folder: Path, parallel: Parallel) -> Path:
    tp, pp = parallel.tp.rank, parallel.pp.rank
    own = folder / f"TP{tp}_PP{pp}_Rank{pp * parallel.tp.size + tp}_pid{os.getpid()}"
    try:
        own.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"--debug-tensor-dump-output-folder has dumps of another server in {own}: name another "
                          "folder.") from None
    except OSError as error:
        raise ConfigError(f"--debug-tensor-dump-output-folder: {own} cannot be made: {error.strerror}.") from None
    return own


def _inputs(batch: ForwardBatch) -> dict[str, Any]:
    """The rows of a step: token ids and positions [T], of each request its tokens so far, and those of the step [B]."""
    ends = batch.qo_indptr_cpu[1:] - 1
    positions = batch.positions.to("cpu", copy=True)
    return {INFO + "input_ids": batch.input_ids.to("cpu", copy=True), INFO + "positions": positions,
            INFO + "seq_lens": positions[torch.from_numpy(ends).long()] + 1,
            INFO + "extend_seq_lens": torch.from_numpy(batch.qo_indptr_cpu[1:] - batch.qo_indptr_cpu[:-1]).long()}


def _on_host(value: Any, one_sequence: bool) -> Any:
    """Copies a tensor, or the tensors of a tuple; returns None where there are none."""
    if isinstance(value, torch.Tensor):
        return (value[0] if one_sequence else value).to("cpu", copy=True)
    if not isinstance(value, tuple):
        return None
    found = [_on_host(each, one_sequence) for each in value if isinstance(each, torch.Tensor)]
    return found[0] if len(found) == 1 else found or None
