"""Request fields that choose the namespace of a request's pages in the prefix cache."""

from __future__ import annotations

import msgspec

from ...api.errors import InvalidRequest
from ...api.namespace import SHARED, Namespace
from .per_prompt import per_prompt

MAX_KEY_CHARS = 256


class NamespaceFields(msgspec.Struct, kw_only=True):
    """``cache_salt`` is vLLM's and SGLang's, ``extra_key`` SGLang's; a list holds one entry per prompt of a batch.

    Prompts share cached pages only where both are equal: timing does not reveal to a user who does not know the salt
    how another user's prompts begin.
    """

    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None


def namespaces_of(fields: NamespaceFields, num_prompts: int) -> list[Namespace]:
    """One entry per prompt. Raises InvalidRequest."""
    if fields.cache_salt is None and fields.extra_key is None:
        return [SHARED] * num_prompts
    salts = _keys("cache_salt", fields.cache_salt, num_prompts)
    return [Namespace(*keys) for keys in zip(salts, _keys("extra_key", fields.extra_key, num_prompts))]


def _keys(name: str, value: str | list[str] | None, num_prompts: int) -> list[str]:
    if value is None:
        return [""] * num_prompts
    keys: list[str] = per_prompt(name, value, num_prompts)
    for key in keys:
        if not 0 < len(key) <= MAX_KEY_CHARS:
            raise InvalidRequest(f"{name} must have 1 to {MAX_KEY_CHARS} characters, got {len(key)}; leave it out to "
                                 "share cached prompts with all requests that name none.", param=name)
    return keys
