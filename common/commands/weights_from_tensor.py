"""Weights that a trainer sends in the body of a request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from ..api.errors import InvalidRequest
from .base import LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server
from .registry import COMMANDS
from .weight_update import UpdateOptions, send_weights


class StageTensors(msgspec.Struct, frozen=True):
    """Stage whole tensors, in safetensors' format: one file's bytes for all ranks, or one's for each, which the
    ``loader`` of --custom-weight-loader converts, where one is named."""

    contents: list[bytes]
    draft: bool = True
    loader: str | None = None


class FromTensorRequest(UpdateOptions, kw_only=True):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    disable_draft_model: bool | None = None


def run(rank: Rank, command: StageTensors) -> Future[str]:
    return rank.weights.stage_safetensors(command.contents, draft=command.draft, loader=command.loader)


async def update_weights_from_tensor(server: Server, body: FromTensorRequest) -> str:
    """Applies whole tensors from the body as ``/end_weight_update`` does; after ``/begin_weight_update`` it only stages
    them.

    ``serialized_named_tensors`` has one entry for all ranks, or one for each: base64 of a safetensors file's bytes
    (``safetensors.torch.save``). Names are those of the checkpoint; some of the model's suffice. 400 names those that
    do not fit, and none is applied. ``disable_draft_model`` leaves the draft model as it is. ``load_format`` names a
    function of ``--custom-weight-loader`` that makes tensors of these names of those that are sent.
    """
    loaders = server.context.config.model.custom_weight_loader
    if body.load_format not in (None, "safetensors", *loaders):
        raise InvalidRequest(f"load_format {body.load_format} is not known: leave it out, or name one of "
                             f"--custom-weight-loader ({', '.join(loaders) or 'none'}).", param="load_format")
    loader = body.load_format if body.load_format in loaders else None
    contents = _decoded(body.serialized_named_tensors)
    return await send_weights(server, StageTensors(contents, not body.disable_draft_model, loader), body)


def _decoded(entries: Sequence[str]) -> list[bytes]:
    try:
        return [base64.b64decode(entry, validate=True) for entry in entries]
    except binascii.Error as error:
        raise InvalidRequest(f"serialized_named_tensors has an entry that is not base64: {error}.",
                             param="serialized_named_tensors") from None


COMMANDS.register("stage_tensors")(Command(StageTensors, run, (
    Endpoint("/update_weights_from_tensor", update_weights_from_tensor, FromTensorRequest,
             broadcast=Broadcast(slow=True)),), while_busy=True, timeout=LOAD_SECONDS))
