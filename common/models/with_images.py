"""The text models within checkpoints of models that also read images, sound or video; what reads those is left out.

A text's positions are the same in all dimensions of multimodal rotary embeddings (M-RoPE, arXiv:2409.12191), which are
plain ones then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from .registry import MODELS, ModelFamily, family_of

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks

_SHARED = ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "tie_word_embeddings")
"""Facts of the text model that may stand outside of its own configuration."""
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.",
                  "language_model.lm_head.": "lm_head."}
_OTHER_PARTS = frozenset(("audio_tower", "multi_modal_projector", "vision_model", "vision_tower", "visual"))


def read(config: ModelConfig, *, text_model: str) -> ModelSpec:
    """Reads the text model's configuration: ``text_config``, or, in the first Qwen2-VL's, the whole one."""
    values = config.values
    text = values.get("text_config", values)
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json's text_config must be an object, not {text!r}.")
    shared = {name: values[name] for name in _SHARED if name in values}
    family = family_of(text_model)
    own = ModelConfig.complete(config.architecture, _plain_rope({**shared, **text}), None, family.defaults, config.args)
    eos_ids = tuple(dict.fromkeys((*config.eos_token_ids, *own.eos_token_ids)))
    return family.read(ModelConfig(own.architecture, own.values, eos_ids, own.args))


def _plain_rope(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with plain rotary embeddings in place of M-RoPE."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if rope and "mrope" in (rope.get("rope_type"), rope.get("type")):
            values[key] = {name: value for name, value in rope.items() if name not in ("type", "rope_type")}
    return values


def blocks(spec: ModelSpec, parallel: Parallel, *, text_model: str) -> Blocks:
    make = family_of(text_model).blocks
    assert make is not None
    return make(spec, parallel)


def tensor_parts_of(spec: ModelSpec, *, text_model: str) -> TensorParts:
    """Names the text model's tensors as those of a model without images, and leaves the others out."""
    parts_of_text = family_of(text_model).parts_of(spec)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        if _OTHER_PARTS.intersection(name.split(".", 2)[:2]):
            return ()
        for prefix, own in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = own + name[len(prefix):]
        return [(name, tensor)] if parts_of_text is None else parts_of_text(name, tensor)

    return parts


def _text_of(text_model: str) -> ModelFamily:
    """Returns the family whose text models are of the architecture ``text_model``."""
    return ModelFamily(
        partial(read, text_model=text_model), partial(blocks, text_model=text_model),
        tensor_parts_of=partial(tensor_parts_of, text_model=text_model), title="Texts of models that read images",
        notes="the text model alone: requests with images are refused")


MODELS.register("Gemma3ForConditionalGeneration")(_text_of("Gemma3ForCausalLM"))
MODELS.register("Llama4ForConditionalGeneration")(_text_of("Llama4ForCausalLM"))
MODELS.register("Mistral3ForConditionalGeneration")(_text_of("MistralForCausalLM"))
MODELS.register("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")(_text_of("Qwen2ForCausalLM"))
MODELS.register("Qwen3VLForConditionalGeneration")(_text_of("Qwen3ForCausalLM"))
MODELS.register("Qwen3VLMoeForConditionalGeneration")(_text_of("Qwen3MoeForCausalLM"))
MODELS.register("Qwen3_5ForConditionalGeneration")(_text_of("Qwen3_5ForCausalLM"))
MODELS.register("Qwen3_5MoeForConditionalGeneration")(_text_of("Qwen3_5MoeForCausalLM"))
