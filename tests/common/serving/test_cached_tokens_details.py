"""Where cached tokens were: counts of the engine in SGLang's fields."""

import msgspec
import pytest

from baton.common.api.messages import LoadedTokens, PromptUsage
from baton.common.serving.protocol.usage import CachedTokensDetails


@pytest.mark.parametrize(("loaded", "num_cached", "details"), [
    (None, 80, {"device": 80, "host": 0}),
    (LoadedTokens(32), 80, {"device": 48, "host": 32}),
    (LoadedTokens(0, 0, "file"), 80, {"device": 80, "host": 0, "storage": 0, "storage_backend": "file"}),
    (LoadedTokens(32, 16, "nixl"), 80, {"device": 32, "host": 32, "storage": 16, "storage_backend": "nixl"}),
    (LoadedTokens(32, 16, "nixl"), 40, {"device": 32, "host": 8, "storage": 0, "storage_backend": "nixl"}),
    (LoadedTokens(96), 80, {"device": 0, "host": 80}),
])
def test_details(loaded, num_cached, details):
    """80 tokens were cached; an answer that another server has begun counts fewer of them to its prompt."""
    found = CachedTokensDetails.of(PromptUsage(100, 80, loaded), num_cached)
    assert msgspec.to_builtins(found) == details
