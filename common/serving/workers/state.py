"""The state of the main process as workers know it."""

from __future__ import annotations

from ..context.serving_context import ServingContext
from .messages import ServerState


def state_of(context: ServingContext, version: int) -> ServerState:
    """The state as it is now."""
    status, requests = context.status, context.telemetry.request_log
    return ServerState(version, status.loading, status.ready, status.dead, context.model.weights_path,
                       context.model.weight_version, requests.level, requests.text,
                       None if requests.dump_folder is None else str(requests.dump_folder), status.num_freezes)


def apply_state(context: ServingContext, state: ServerState) -> None:
    """Makes the state a worker's."""
    status, requests = context.status, context.telemetry.request_log
    status.loading, status.ready = state.loading, state.ready
    context.model.weights_path, context.model.weight_version = state.weights_path, state.weight_version
    folder = None if requests.dump_folder is None else str(requests.dump_folder)
    if (requests.level, requests.text, folder) != (state.log_level, state.log_text, state.dump_folder):
        requests.configure(state.log_level, state.dump_folder, state.log_text)
    if status.num_freezes != state.num_freezes:
        status.freeze_garbage()
        status.num_freezes = state.num_freezes
    if state.dead is not None and context.client.dead is None:
        context.telemetry.request_log.dump(state.dead)
        context.client.engine_died(state.dead)
