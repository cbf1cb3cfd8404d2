"""Flags of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..cli import flag
from ..rules import Rule, ServerRule, at_least


@dataclass(frozen=True)
class StorageArgs:
    file_storage_path: str | None = flag(None, help=(
        "folder for uploaded files and batches, which outlive the server; servers of one host may share it"))
    batch_concurrency: int = flag(16, help=(
        "most lines of batches that run together; every other running request takes one of these slots"))

    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: c.storage.file_storage_path is not None and not c.duties.answers_clients,
             "--file-storage-path is for unified and decode servers: a prefill server answers no requests by itself, "
             "so it cannot run batches."),
    )

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_concurrency")
