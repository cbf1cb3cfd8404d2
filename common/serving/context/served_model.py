"""The model that a server serves, and the formats that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...api.errors import InvalidRequest, NotFound
from ...api.identity import ModelIdentity
from ...api.messages import Pooling
from ...config.checkpoint import read_config, read_json, resolve_metadata, resolve_pooling
from ...config.model import ModelSpec
from ...config.server import ChatArgs, ServerConfig
from ...parsers.reasoning import REASONING_FORMATS, ReasoningFormat
from ...parsers.tools import TOOL_FORMATS, ToolFormat, detect
from ...tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatFormats:
    """The formats of tool calls and of reasoning; None where answers are not parsed."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def select(cls, args: ChatArgs, template: str | None) -> ChatFormats:
        """``template`` is the source of the chat template, which selects the format for 'auto'."""
        tools = detect(template or "") if args.tool_call_parser == "auto" else args.tool_call_parser
        reasoning = args.reasoning_parser
        return cls(None if tools in (None, "none") else TOOL_FORMATS.get(tools),
                   None if reasoning in (None, "none") else REASONING_FORMATS.get(reasoning))


class ServedModel:
    """The model that this server serves; ``tokenizer`` and ``chat_formats`` are set while the server starts."""

    def __init__(self, config: ServerConfig, spec: ModelSpec):
        self.spec = spec
        self.name = config.model_name
        self.weights_path = config.model.model_path
        self.weight_version = config.model.weight_version
        self.tokenizer: Tokenizer | None = None
        self.chat_formats = ChatFormats(None, None)
        self._args = config.model
        self._recommends = config.answers.sampling_defaults

    def take_version(self, identity: ModelIdentity | None) -> None:
        """Takes the name of weights that another server has sent, unless --weight-version names them."""
        if identity is not None and identity.version is not None and self._args.weight_version == "default":
            self.weight_version = identity.version

    @cached_property
    def pooling(self) -> Pooling:
        """The pooling of a prompt's hidden states on an embedding server."""
        if self.spec.head == "classifier" and self.spec.pooling == "cls":
            return "cls"  # whatever the files say: its head reads the first token
        return resolve_pooling(self._args, self.spec.pooling)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's labels, those of transformers where config.json has none."""
        names = (read_config(self._args) or {}).get("id2label") or {}
        return tuple(str(names.get(str(label), f"LABEL_{label}")) for label in range(self.spec.num_labels))

    @cached_property
    def sampling_defaults(self) -> dict[str, float]:
        """The sampling parameters of chats and completions that leave them out, where the checkpoint is to say."""
        if self._recommends != "model":
            return {}
        found = read_json(resolve_metadata(self._args) / "generation_config.json") or {}
        return {name: found[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
                if type(found.get(name)) in (int, float)}

    def check_name(self, name: str | None) -> None:
        """Raises NotFound for a model that this server does not serve."""
        if name and name not in (self.name, self.name.rstrip("/").rsplit("/", 1)[-1], "default"):
            raise NotFound(f"The model {name!r} does not exist; this server serves {self.name!r}.", param="model",
                           code="model_not_found")

    def check_generates(self) -> None:
        """Raises InvalidRequest on a server of embeddings."""
        if self._args.is_embedding:
            raise InvalidRequest("This server was started with --is-embedding and generates no text; use "
                                 "/v1/embeddings.")
