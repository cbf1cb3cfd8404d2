"""Flags of files and batches."""

from __future__ import annotations

from dataclasses import dataclass

from ..cli import flag


@dataclass(frozen=True)
class StorageArgs:
    file_storage_path: str | None = flag(None, help=(
        "folder for uploaded files and batches, which outlive the server; servers of one host may share it"))
    batch_concurrency: int = flag(16, help=(
        "most lines of batches that run together; every other running request takes one of these slots"))
