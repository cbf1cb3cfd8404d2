"""Programs over language models: prompts in Python, with variables, choices, forks and batches.

::

    import baton.lang as sgl

    @sgl.function
    def qa(s, question):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=64))

    sgl.set_default_backend(sgl.RuntimeEndpoint("http://localhost:30000"))
    print(qa.run("What is the capital of France?")["answer"])

The words and their meanings are those of SGLang's frontend language. Needs no torch.
"""

from __future__ import annotations

from .api import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from .backends.anthropic import Anthropic
from .backends.base import Backend
from .backends.default import flush_cache, get_server_info, set_default_backend
from .backends.engine import EngineBackend, Runtime
from .backends.litellm import LiteLLM
from .backends.openai import OpenAI
from .backends.runtime_endpoint import RuntimeEndpoint
from .choices import (
    ChoicesMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from .errors import BackendError, ProgramError
from .program import Program, function
from .state import ProgramState, ProgramStateGroup

__all__ = [
    "Anthropic", "Backend", "BackendError", "ChoicesMethod", "EngineBackend", "LiteLLM", "OpenAI", "Program",
    "ProgramError", "ProgramState", "ProgramStateGroup", "Runtime", "RuntimeEndpoint", "assistant", "assistant_begin",
    "assistant_end", "flush_cache", "function", "gen", "gen_int", "gen_string", "get_server_info",
    "greedy_token_selection", "image", "select", "set_default_backend", "system", "system_begin", "system_end",
    "token_length_normalized", "unconditional_likelihood_normalized", "user", "user_begin", "user_end", "video",
]
