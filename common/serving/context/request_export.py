"""Lines of JSON about each request that ended, in files that other programs collect (--export-metrics-to-file)."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from ...api.messages import Generate
from ...config.server import ObserveArgs
from ...obs.logging import check_folder
from .request_log import shown_parameters

log = logging.getLogger("baton.requests")


class RequestExport:
    """Appends a line for each request to a file of the current hour; a thread writes, for a folder may be remote.

    Names and fields are SGLang's, whose users have programs that read them.
    """

    def __init__(self, folder: Path, level: int):
        """``level``: of the parameters, as of --log-requests-level."""
        self._folder = folder
        self._level = level
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="export")

    @classmethod
    def of(cls, args: ObserveArgs) -> RequestExport | None:
        """The export that the flags ask for; raises ConfigError for a folder that cannot be written."""
        if args.export_metrics_to_file_dir is None:
            return None
        return cls(check_folder(args.export_metrics_to_file_dir, "--export-metrics-to-file-dir"),
                   args.log_requests_level)

    def end(self, request: Generate, outcome: str, *, seconds: float, num_prompt_tokens: int, num_cached_tokens: int,
            num_output_tokens: int, first_token_seconds: float | None, weight_version: str) -> None:
        """``outcome``: a finish reason, an error's code, or ``disconnected``; seconds since the request arrived."""
        parameters = msgspec.json.encode(shown_parameters(request, self._level)).decode()
        fields: dict[str, Any] = {
            "request_parameters": parameters, "id": request.rid, "finish_reason": {"type": outcome},
            "prompt_tokens": num_prompt_tokens, "cached_tokens": num_cached_tokens,
            "completion_tokens": num_output_tokens, "e2e_latency": seconds, "time_to_first_token": first_token_seconds,
            "weight_version": weight_version, "timestamp": time.time()}
        self._writer.submit(self._write, msgspec.json.encode(fields) + b"\n")

    def close(self) -> None:
        """Writes what is still to be written."""
        self._writer.shutdown()

    def _write(self, line: bytes) -> None:
        path = self._folder / time.strftime("sglang-request-metrics-%Y%m%d_%H.log")
        try:
            with path.open("ab", buffering=0) as file:  # several processes append: one write a line
                file.write(line)
        except OSError as error:
            log.error("%s was not written: %s", path, error.strerror)
