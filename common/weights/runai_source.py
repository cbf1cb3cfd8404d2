"""``--load-format runai_streamer``: safetensors files, read by the Run:ai Model Streamer's threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..api.errors import ConfigError
from ..config.load_format import LOAD_FORMATS
from ..config.server import ModelArgs
from .files import checkpoint_files
from .lazy import InMemory
from .safetensors_source import SafetensorsSource
from .slots import Slot
from .source import SourceTensor


@LOAD_FORMATS.register("runai_streamer", needs={"runai_model_streamer": "runai-model-streamer"})
class RunaiSource(SafetensorsSource):
    """The safetensors files of the checkpoint that ``args`` name, each tensor whole: for storages that are fast with
    many reads at a time."""

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        try:
            import runai_model_streamer  # noqa: F401
        except ImportError:
            raise ConfigError("--load-format runai_streamer needs the package runai-model-streamer, which is not "
                              "installed: pip install runai-model-streamer.") from None

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        if not slots:  # who asks for no slots reads headers, and few tensors
            yield from super().tensors(slots)
            return
        from runai_model_streamer import SafetensorsStreamer

        files = checkpoint_files(self._folder)
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(file) for file in files])
            for name, tensor in streamer.get_tensors():
                # The streamer overwrites its buffer when the next tensor is asked for.
                yield SourceTensor(name, InMemory(tensor.clone()), self.name)
