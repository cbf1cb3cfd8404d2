"""Weights that a trainer sends in the body of a request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal

import msgspec

from ..api.errors import InvalidRequest
from .base import LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server
from .registry import COMMANDS
from .weight_update import UpdateOptions, send_weights

TensorForm = Literal["safetensors", "handles", "pickled", "pickled_bucket"]

_PICKLED: dict[str, TensorForm] = {"direct": "pickled", "flattened_bucket": "pickled_bucket"}
"""SGLang's values of ``load_format`` for tensors that are pickled."""
_UNPICKLED: dict[str, TensorForm] = {"safetensors": "safetensors", "handles": "handles"}


class StageTensors(msgspec.Struct, frozen=True):
    """Stage whole tensors: one file's bytes for all ranks, or one's for each, which the ``loader`` of
    --custom-weight-loader converts, where one is named."""

    contents: list[bytes]
    form: TensorForm = "safetensors"
    draft: bool = True
    loader: str | None = None


class FromTensorRequest(UpdateOptions, kw_only=True):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    disable_draft_model: bool | None = None


class FromIPCRequest(UpdateOptions, kw_only=True):
    zmq_handles: dict[str, str] = {}


def run(rank: Rank, command: StageTensors) -> Future[str]:
    return rank.weights.stage_contents(command.contents, command.form, draft=command.draft, loader=command.loader)


async def update_weights_from_tensor(server: Server, body: FromTensorRequest) -> str:
    """Applies whole tensors from the body as ``/end_weight_update`` does; after ``/begin_weight_update`` it only stages
    them.

    ``serialized_named_tensors`` has one entry for all ranks, or one for each: base64 of a safetensors file's bytes
    (``safetensors.torch.save``), or with the ``load_format`` ``handles`` the ``entry`` of ``baton.share_tensors``,
    which says where tensors are in the memory of a GPU or of the host. Names are those of the checkpoint; some of the
    model's suffice. 400 names those that do not fit, and none is applied. ``disable_draft_model`` leaves the draft
    model as it is. ``load_format`` may also name a function of ``--custom-weight-loader`` that makes tensors of these
    names of those that are sent. With ``--enable-pickled-weights`` entries may be what SGLang's clients pickle, also
    with the ``load_format`` ``flattened_bucket``.
    """
    loaders = server.context.config.model.custom_weight_loader
    if body.load_format not in (None, *_UNPICKLED, *_PICKLED, *loaders):
        raise InvalidRequest(f"load_format {body.load_format} is not known: leave it out, or name handles, or "
                             f"one of --custom-weight-loader ({', '.join(loaders) or 'none'}).", param="load_format")
    loader = body.load_format if body.load_format in loaders else None
    contents = _decoded(body.serialized_named_tensors)
    form = _UNPICKLED.get(body.load_format or "", "safetensors")
    if body.load_format in _PICKLED or any(map(_is_pickle, contents)):
        if not server.context.config.model.enable_pickled_weights:
            raise InvalidRequest("serialized_named_tensors is pickled, which the server takes only with "
                                 "--enable-pickled-weights: send base64 of safetensors.torch.save(tensors), without "
                                 "load_format.", param="serialized_named_tensors")
        form = _PICKLED.get(body.load_format or "", "pickled")
    return await send_weights(server, StageTensors(contents, form, not body.disable_draft_model, loader), body)


async def update_weights_from_ipc(server: Server, body: FromIPCRequest) -> str:
    """400: checkpoint-engine's sockets carry pickles, which a server does not read; ``/update_weights_from_tensor``
    takes handles that are not pickled, ``/update_weights_from_distributed`` tensors from a process group."""
    raise InvalidRequest("This server reads no pickled handles from checkpoint-engine's sockets: send those of "
                         "baton.share_tensors by /update_weights_from_tensor with the load_format handles, or the "
                         "tensors by /update_weights_from_distributed.", param="zmq_handles")


def _is_pickle(content: bytes) -> bool:
    """Returns whether bytes are a pickle; a safetensors file has a JSON object after its first eight."""
    return content[:1] == b"\x80" and content[8:9] != b"{"


def _decoded(entries: Sequence[str]) -> list[bytes]:
    try:
        return [base64.b64decode(entry, validate=True) for entry in entries]
    except binascii.Error as error:
        raise InvalidRequest(f"serialized_named_tensors has an entry that is not base64: {error}.",
                             param="serialized_named_tensors") from None


COMMANDS.register("stage_tensors")(Command(StageTensors, run, (
    Endpoint("/update_weights_from_tensor", update_weights_from_tensor, FromTensorRequest,
             broadcast=Broadcast(slow=True)),
    Endpoint("/update_weights_from_ipc", update_weights_from_ipc, FromIPCRequest, broadcast=Broadcast(slow=True)),
    ), while_busy=True, timeout=LOAD_SECONDS))
