"""``baton.Engine``: the engine in processes below this one, without a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..chat_template import TEMPLATES, ChatTemplate, template_named
from ..choices import ChoicesMethod, Decision
from ..sampling import SamplingParams
from . import native
from .base import Answer, Prompt
from .served_template import served_template

if TYPE_CHECKING:
    from ...offline import Engine


class Runtime:
    """An engine for programs: ``set_default_backend(Runtime(model_path="tinychat"))``.

    ``flags`` are those of ``baton.Engine``. The text around turns is the template named ``chat_template_name``, else
    the model's own. Raises ConfigError where the engine cannot start, ImportError where its packages are not installed,
    ProgramError for an unknown template.
    """

    def __init__(self, model_path: str, *, chat_template_name: str | None = None, **flags: Any):
        from ... import Engine

        self.engine = Engine(model_path, **flags)
        try:
            self.endpoint = EngineBackend(self.engine, chat_template_name)
        except BaseException:
            self.engine.shutdown()
            raise

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stops the engine's processes."""
        self.engine.shutdown()

    def cache_prefix(self, prefix: str) -> None:
        self.endpoint.cache_prefix(prefix)

    def generate(self, prompt: str | list[str], sampling_params: Any = None, **fields: Any) -> Any:
        """As ``baton.Engine.generate``."""
        return self.engine.generate(prompt, sampling_params, **fields)

    async def async_generate(self, prompt: str | list[str], sampling_params: Any = None, **fields: Any) -> Any:
        """As ``baton.Engine.async_generate``."""
        return await self.engine.async_generate(prompt, sampling_params, **fields)


class EngineBackend:
    """Programs on an engine that the caller has, whose prefill and decode may be apart. Raises ProgramError."""

    def __init__(self, engine: Engine, chat_template_name: str | None = None):
        self._engine = engine
        self._client = _GenerateCalls(engine)
        self._template = (template_named(chat_template_name) if chat_template_name
                          else served_template(self._post) or TEMPLATES["default"])

    def chat_template(self) -> ChatTemplate:
        return self._template

    def generate(self, prompt: Prompt, params: SamplingParams) -> Answer:
        return native.generate(self._client, prompt, params)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[Answer]:
        return native.stream(self._client, prompt, params)

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod) -> Decision:
        return native.select(self._client, prompt, choices, method)

    def cache_prefix(self, text: str) -> None:
        native.cache_prefix(self._client, text)

    def flush_cache(self) -> None:
        self._engine.flush_cache()

    def get_server_info(self) -> Any:
        """A snapshot of the engine: pages, requests, counters."""
        return self._engine.state()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._engine.tokenize(**body) if path == "/tokenize" else self._engine.detokenize(**body)


class _GenerateCalls:
    """``Engine.generate`` by bodies."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def answer(self, body: dict[str, Any]) -> Any:
        fields = dict(body)
        return self._engine.generate(fields.pop("text", None), fields.pop("sampling_params"), **fields)

    def answers(self, body: dict[str, Any]) -> Iterator[Any]:
        fields = dict(body)
        answers: Iterator[Any] = self._engine.generate(fields.pop("text"), fields.pop("sampling_params"), stream=True,
                                                       **fields)
        return answers
