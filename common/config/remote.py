"""Folders of checkpoints that are read over a network: ``http://``, ``https://``, ``s3://``, ``redis://``. No torch.

Weights are read in ranges of bytes; the other files are copied to a local folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..api.errors import ConfigError

_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
          "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
          "chat_template.json", "1_Pooling/config.json", "model.safetensors.index.json", "hf_quant_config.json",
          "quantize_config.json")
_TIMEOUT_SECONDS = 60
_TRIES = 3


class RemoteFolder(Protocol):
    """A folder of files. Methods raise ConfigError where it cannot be reached."""

    url: str

    def read(self, name: str) -> bytes | None:
        """Returns a file's bytes; None where there is no such file."""

    def read_range(self, name: str, start: int, size: int) -> bytes:
        """Returns a part of a file."""


def is_remote(path: str) -> bool:
    """Returns whether ``--model-path`` names a folder on a network."""
    return path.partition("://")[0] in _SCHEMES and "://" in path


def open_remote(url: str) -> RemoteFolder:
    """Returns the folder at an address; raises ConfigError for one that needs a package which is not installed."""
    return _SCHEMES[url.partition("://")[0]](url.rstrip("/"))


@functools.cache
def fetch_metadata(url: str, download_dir: str | None) -> Path:
    """Copies all files but the weights to a folder below ``download_dir``, by default one of this user's for temporary
    files, and returns it; once a process, and anew where config.json has changed. Raises ConfigError where there is no
    config.json."""
    root = Path(download_dir).expanduser() if download_dir else Path(tempfile.gettempdir()) / f"baton-{_user()}"
    target = root / f"remote-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    folder = open_remote(url)
    config = folder.read("config.json")
    if config is None:
        raise ConfigError(f"--model-path {url} has no config.json: it is not a Hugging Face checkpoint.")
    if not (target / ".complete").exists() or (target / "config.json").read_bytes() != config:
        found = {name: content for name in _FILES if (content := folder.read(name)) is not None}
        try:
            for name, content in found.items():
                (target / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with tempfile.NamedTemporaryFile(dir=target, delete=False) as file:
                    file.write(content)
                Path(file.name).replace(target / name)
            (target / ".complete").touch()
        except OSError as error:
            raise ConfigError(f"Cannot write {target} ({error.strerror}): set --download-dir to a folder for the files "
                              f"of {url}.") from None
    return target


def safetensors_of(folder: RemoteFolder) -> list[str]:
    """Returns the names of a folder's files of weights; raises ConfigError for an index that cannot be read."""
    index = folder.read("model.safetensors.index.json")
    if index is None:
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"Cannot read {folder.url}/model.safetensors.index.json: {error!r}.") from None


def _user() -> str:
    import getpass

    return getpass.getuser()


class _Http:
    """A folder of a web server that answers requests for ranges."""

    def __init__(self, url: str):
        self.url = url

    def read(self, name: str) -> bytes | None:
        return self._get(name, {})

    def read_range(self, name: str, start: int, size: int) -> bytes:
        content = self._get(name, {"Range": f"bytes={start}-{start + size - 1}"}) if size else b""
        if content is None:
            raise ConfigError(f"{self.url} lacks {name}, which its index names.")
        if len(content) != size:
            raise ConfigError(f"{self.url}/{name} answers a request for {size} bytes with {len(content)}: its server "
                              "must serve ranges of whole files.")
        return content

    def _get(self, name: str, headers: dict[str, str]) -> bytes | None:
        request = urllib.request.Request(f"{self.url}/{urllib.parse.quote(name)}", headers=headers)
        for left in reversed(range(_TRIES)):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                    if headers and answer.status != 206:
                        raise ConfigError(f"{self.url}/{name} is not served in ranges (status {answer.status}): copy "
                                          "the checkpoint to a folder, or use a server that knows ranges.")
                    content: bytes = answer.read()
                    return content
            except urllib.error.HTTPError as error:
                if error.code in (404, 410):
                    return None
                reason = f"status {error.code}"
            except (OSError, ValueError) as error:  # a connection that breaks, or a name that is unknown
                reason = str(getattr(error, "reason", error))
            if not left:
                raise ConfigError(f"Cannot read {self.url}/{name}: {reason}.")
        raise AssertionError


class _S3:
    """A prefix of a bucket, ``s3://BUCKET/PREFIX``, with the credentials that boto3 finds."""

    def __init__(self, url: str):
        try:
            import boto3
            import botocore.exceptions
        except ImportError:
            raise ConfigError(f"--model-path {url} needs the package boto3, which is not installed: pip install "
                              "boto3.") from None
        self.url = url
        self._bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self._errors: tuple[type[Exception], ...] = (botocore.exceptions.BotoCoreError,
                                                     botocore.exceptions.ClientError)
        self._client = boto3.client("s3")

    def read(self, name: str) -> bytes | None:
        return self._get(name)

    def read_range(self, name: str, start: int, size: int) -> bytes:
        content = self._get(name, Range=f"bytes={start}-{start + size - 1}") if size else b""
        if content is None or len(content) != size:
            raise ConfigError(f"{self.url} lacks {name}, or a part of it.")
        return content

    def _get(self, name: str, **options: str) -> bytes | None:
        key = f"{self._prefix}/{name}" if self._prefix else name
        try:
            content: bytes = self._client.get_object(Bucket=self._bucket, Key=key, **options)["Body"].read()
        except self._errors as error:
            response: Any = getattr(error, "response", {})
            if response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                return None
            raise ConfigError(f"Cannot read {self.url}/{name}: {error}.") from None
        return content


class _Redis:
    """Keys of a Redis server, ``redis://HOST:PORT/PREFIX``: the value of ``PREFIX/NAME`` is the file's content."""

    def __init__(self, url: str):
        try:
            import redis
        except ImportError:
            raise ConfigError(f"--model-path {url} needs the package redis, which is not installed: pip install "
                              "redis.") from None
        self.url = url
        parts = urllib.parse.urlsplit(url)
        self._prefix = parts.path.strip("/")
        self._error: type[Exception] = redis.RedisError
        self._client = redis.Redis.from_url(f"{parts.scheme}://{parts.netloc}")

    def read(self, name: str) -> bytes | None:
        content: bytes | None = self._call(lambda: self._client.get(f"{self._prefix}/{name}"), name)
        return content

    def read_range(self, name: str, start: int, size: int) -> bytes:
        content: bytes = self._call(lambda: self._client.getrange(f"{self._prefix}/{name}", start, start + size - 1),
                                    name) if size else b""
        if len(content) != size:
            raise ConfigError(f"{self.url} lacks {name}, or a part of it.")
        return content

    def _call(self, work: Callable[[], Any], name: str) -> Any:
        try:
            return work()
        except self._error as error:
            raise ConfigError(f"Cannot read {self.url}/{name}: {error}.") from None


_SCHEMES: dict[str, Callable[[str], RemoteFolder]] = {
    "http": _Http, "https": _Http, "s3": _S3, "redis": _Redis, "rediss": _Redis}
