"""The cost model: the time of a step by its rows, of a transfer by its bytes, and of a request outside of the engine.

Times are milliseconds here, as they are measured; the simulator works in seconds. A prefill step of chunks with
``q`` tokens after ``start`` earlier ones takes ``prefill_step + sum(q) * prefill_token + sum(q * (start + q / 2)) *
prefill_context``: products grow with the tokens, attention with the pairs of tokens. Where the host launches a step of
few tokens for longer than the device computes it, it takes ``host_prefill``. A decode step of b requests with n
tokens of context in total takes ``decode_base(b) + n * decode_context``: reading the weights and the products, then
reading the KV cache.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from ...common.api.errors import ConfigError

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class StepCosts:
    """Time of a step on the device. ``decode_batches`` (ascending) and ``decode_base`` are a curve, linear between its
    points and beyond the last; ``mixed``: a mixed step takes this share of the sum of its parts. ``host_*``: the host's
    time to launch a step, which shows where it is longer than the device's."""

    prefill_step: float
    prefill_token: float
    prefill_context: float
    decode_batches: tuple[int, ...]
    decode_base: tuple[float, ...]
    decode_context: float
    mixed: float = 1.0
    host_decode: float = 0.3
    host_prefill: float = 1.0

    def __post_init__(self) -> None:
        if len(self.decode_batches) != len(self.decode_base) or not self.decode_batches:
            raise ConfigError("decode_batches and decode_base of a cost table need the same number of entries, one or "
                              "more.")
        if list(self.decode_batches) != sorted(set(self.decode_batches)) or self.decode_batches[0] < 1:
            raise ConfigError("decode_batches of a cost table must ascend, from 1 or more.")
        values = [getattr(self, each.name) for each in fields(self) if each.name != "decode_batches"]
        if any(value < 0 for value in (*values[:3], *self.decode_base, *values[4:])):
            raise ConfigError("A cost table has a negative cost; fit it from more samples.")

    def prefill(self, tokens: float, pairs: float) -> float:
        """``pairs``: sum of q * (start + q / 2) over the chunks."""
        return self.prefill_step + tokens * self.prefill_token + pairs * self.prefill_context

    def prompt(self, tokens: float, cached: float = 0.0, chunk: float = 8192.0) -> float:
        """A whole prompt alone, in chunks."""
        total, start, end = 0.0, cached, max(tokens, cached + 1.0)
        while start < end:
            q = min(chunk, end - start)
            total += max(self.host_prefill, self.prefill(q, q * (start + q / 2)))
            start += q
        return total

    def decode_weights(self, rows: float) -> float:
        """The part of a decode step of ``rows`` requests that does not depend on their contexts."""
        xs, ys = self.decode_batches, self.decode_base
        if rows <= xs[0] or len(xs) == 1:
            return ys[0]
        right = min(bisect_left(xs, rows), len(xs) - 1)
        x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
        return y0 + (y1 - y0) * (rows - x0) / (x1 - x0)

    def decode(self, rows: float, context: float) -> float:
        """A decode step of ``rows`` requests with ``context`` tokens in total."""
        return self.decode_weights(rows) + context * self.decode_context

    def scaled(self, factor: float) -> StepCosts:
        """All device times multiplied by ``factor``."""
        return replace(self, prefill_step=self.prefill_step * factor, prefill_token=self.prefill_token * factor,
                       prefill_context=self.prefill_context * factor, decode_context=self.decode_context * factor,
                       decode_base=tuple(base * factor for base in self.decode_base))


@dataclass(frozen=True)
class RequestCosts:
    """Time of a request outside of the engine. ``request``: from the client's send until an idle engine has it;
    ``answer``: from the engine's output until the client has read it. The API server works one request after the other
    for ``api_request`` of that, and ``api_token`` on each token; a router adds ``router``."""

    request: float = 0.6
    answer: float = 0.3
    api_request: float = 0.4
    api_token: float = 0.012
    router: float = 0.1


@dataclass(frozen=True)
class TransferCosts:
    """Transfer of KV pages from one prefill to one decode server: GB/s of a link, milliseconds from the last byte until
    decode knows, and of a control message. ``bytes_per_token`` of the whole model; ``layer_groups`` are pushed one by
    one while the next is computed."""

    bandwidth: float = 300.0
    latency: float = 0.2
    message: float = 0.1
    bytes_per_token: int = 131072
    layer_groups: int = 2


@dataclass(frozen=True)
class Costs:
    """A cost table. ``kv_tokens``: tokens of KV cache that a server has; ``gpus``: that one server takes."""

    name: str
    model: str
    device: str
    steps: StepCosts
    requests: RequestCosts = field(default_factory=RequestCosts)
    transfer: TransferCosts = field(default_factory=TransferCosts)
    kv_tokens: int = 400_000
    page_size: int = 16
    gpus: int = 1
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each figure."""

    def __post_init__(self) -> None:
        if self.kv_tokens < self.page_size or self.page_size < 1 or self.gpus < 1:
            raise ConfigError(f"The cost table {self.name!r} has no KV cache, no pages or no GPU.")

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(asdict(self)), indent=1) + b"\n"


def shipped() -> list[str]:
    """The names of the tables that are shipped."""
    return sorted(path.stem for path in TABLES.glob("*.json"))


def load(name: str) -> Costs:
    """Reads a shipped table by its name, or a file that ``bench_calibrate`` wrote. Raises ConfigError."""
    path = TABLES / f"{name}.json" if name in shipped() else Path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Costs)
    except OSError as error:
        raise ConfigError(f"There is no cost table {name!r} ({error.strerror}): give a file that bench_calibrate "
                          f"wrote, or the name of one that is shipped: {', '.join(shipped())}.") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name} is no cost table: {error}.") from None


def describe(costs: Costs) -> dict[str, Any]:
    """The table's fields for a report."""
    return asdict(costs)
