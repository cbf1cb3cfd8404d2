"""Tool calls in a model's answer: how each family of models writes them. One format a file, no torch."""

from .call_emitter import CallEmitter, Schemas
from .format import Layout, Tag, ToolFormat
from .json_array import JSON_ARRAY
from .registry import FORMATS, detect

__all__ = ["FORMATS", "JSON_ARRAY", "CallEmitter", "Layout", "Schemas", "Tag", "ToolFormat", "detect"]
