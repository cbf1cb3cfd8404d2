"""``/v1/models`` and ``/v1/models/{name}`` of a router whose workers serve several models."""

from __future__ import annotations

from urllib.parse import unquote

from ..net.request import Request
from ..net.responses import Response
from ..workers.models import Models

MODELS = b"/v1/models"
READING = (b"GET", b"HEAD")


def answer_models(models: Models, request: Request) -> Response:
    """The models of all workers and the aliases, or one of them; raises ModelNotFound."""
    name = unquote(request.path[len(MODELS):].decode("latin-1")).strip("/")
    if name:
        return Response.json(models.card(name))
    return Response.json({"object": "list", "data": models.cards()})
