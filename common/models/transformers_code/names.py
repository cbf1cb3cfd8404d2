"""The names under which a checkpoint stores the parameters of a model of transformers.

Transformers renames tensors, and stacks those of experts, while it loads; this is the way back, by its own rules.
"""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ...api.errors import ConfigError


class CheckpointNames:
    """The checkpoint's names of a model's tensors."""

    def __init__(self, model: Any):
        forward = [rule for rule in get_model_conversion_mapping(model, add_legacy=False)
                   if not isinstance(rule, PrefixChange)][::-1]
        backward = [(rule, rule.reverse_transform()) for rule in forward]
        self._renamings = [rule for _, rule in backward if isinstance(rule, WeightRenaming)]
        self._converters = [(rule, back) for rule, back in backward if isinstance(rule, WeightConverter)]

    def of(self, name: str) -> str:
        """Returns the name of the parameter ``name``; raises ConfigError for one that is stored in another form."""
        (only,) = self.parts_of(name)
        if "*" in only:
            raise ConfigError(f"--model-impl transformers does not load {name}: its checkpoint has it in parts.")
        return only

    def parts_of(self, name: str) -> list[str]:
        """Returns the names of the tensors that are, one after another, the parameter ``name``: of stacked experts with
        ``*`` for the expert. Raises ConfigError for other forms."""
        for forward, backward in self._converters:
            renamed, found = backward.rename_source_key(name)
            if found is None:
                continue
            kinds = [type(operation) for operation in forward.operations]
            if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]):
                raise ConfigError(f"--model-impl transformers does not load {name}: its checkpoint has it in another "
                                  "form.")
            first, *others = backward.target_patterns
            return [self._renamed(part) for part in [renamed, *(renamed.replace(first, other) for other in others)]]
        return [self._renamed(name)]

    def _renamed(self, name: str) -> str:
        return str(rename_source_key(name, self._renamings, [], reverse=True)[0])
