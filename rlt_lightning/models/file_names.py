"""Convert weights between a model's parameters and its files, by transformers' mapping.

When transformers loads a model, it renames, joins and splits weights. Files, and the workers that load them,
keep the original names and shapes:

    files    experts.0.gate_proj.weight  experts.0.up_proj.weight  experts.1.gate_proj.weight  …
                │ PretrainedFiles: what from_pretrained does              ▲ to_file_names: what
                ▼                                                         │ save_pretrained does
    memory   experts.gate_up_proj, (experts, 2 * intermediate, hidden)

Both convert one group at a time: the weights that become each other, such as all experts of one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlt_lightning.models.weights import (
    Deferred,
    NamedTensor,
    WeightFiles,
    full_shape,
    require_weights,
    stored_once,
    whole_tensors,
)


@dataclass
class Group:
    """Weights that are converted together.

    Attributes:
        converter: What joins or splits them; None: a weight that is only renamed.
        sources: Each weight's name before, and the converter's pattern for it.
    """

    converter: Any
    sources: list[tuple[str, Any]] = field(default_factory=list)

    def convert(self, model: Any, name: str, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Return the tensors after the conversion by name; `name` is what the first of them becomes."""
        if self.converter is None:
            return {name: tensors[0]}
        converter = deepcopy(self.converter)
        for (source, pattern), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(name, source, pattern, tensor)
        del tensors[:]  # the converter frees them as it goes
        converted = converter.convert(name, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}


def split_conversions(conversions: list[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return transformers' renamings, its converters, and the converters by the patterns that they match."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    return renamings, converters, {pattern: c for c in converters for pattern in c.source_patterns}


class PretrainedFiles:
    """A model's files, read under the names of its parameters and persistent buffers.

    Which of transformers' conversions the files need is noted in the model, as from_pretrained does.

    `set_model_state_dict` with `broadcast_from_rank0` would need the whole model in rank 0's main memory:
    14 GiB for 7 billion weights in bfloat16, 61 for 32 billion, twice that in float32. Here each process
    holds a tensor or a group at a time, at most 2 and 3 GiB of Qwen2.5's in float32. ZeRO-3 and an export
    read in this way too.

    Args:
        model: The model, which may be empty.
        files: Its files.

    Raises:
        InputError: If the files lack a weight of the model, or have it in another shape.
    """

    def __init__(self, model: Any, files: WeightFiles) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        self.model = model
        self.files = files
        # By the name of the first weight that a group becomes; and each weight's group.
        self.groups: dict[str, Group] = {}
        self.group_of: dict[str, str] = {}
        # What has been converted, but not been read yet.
        self.converted: dict[str, Tensor] = {}
        conversions = get_model_conversion_mapping(model)
        renamings, converters, by_pattern = split_conversions(conversions)
        prefix, known = model.base_model_prefix, model.state_dict()
        for key in sorted(files.file_of, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = rename_source_key(key, [], [], prefix, known)
            if name in known:
                self.groups.setdefault(name, Group(by_pattern.get(pattern or ""))).sources.append(
                    (key, pattern)
                )
        model._weight_conversions = [c for c in conversions if c.was_used()]
        shapes: dict[str, tuple[int, ...]] = {}
        for name, group in self.groups.items():
            parts = group.convert(model, name, [files.empty(key) for key, _ in group.sources])
            self.group_of |= dict.fromkeys(parts, name)
            shapes |= {part: full_shape(tensor) for part, tensor in parts.items()}
        stored = stored_once(model)
        require_weights(files.name, [n for n, t in stored.items() if shapes.get(n) != full_shape(t)])

    def __call__(self, name: str) -> Tensor:
        """Return one whole tensor, in the type in which it is stored."""
        if name not in self.converted:
            first = self.group_of[name]
            group = self.groups[first]
            tensors = [self.files(key) for key, _ in group.sources]
            self.converted = group.convert(self.model, first, tensors)
        return self.converted.pop(name)


def to_file_names(model: Any, named_tensors: list[NamedTensor]) -> list[NamedTensor]:
    """Return weights as the model's files have them: under their names, joined or split.

    A joined tensor is gathered when the first of its parts is read, and held until the last has been: an
    expert layer's weights are in memory twice meanwhile. Each part must be read once, in order, on all ranks.

    Args:
        model: The model, as `load_model` or `empty_model` made it.
        named_tensors: Its weights, or placeholders for them, under its names without an adapter.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    reverse = [conversion.reverse_transform() for conversion in reversed(model._weight_conversions)]
    renamings, converters, by_pattern = split_conversions(reverse)
    groups: dict[str, Group] = {}
    tensors = dict(named_tensors)
    for name in sorted(tensors, key=dot_natural_key):
        key, pattern = rename_source_key(name, [], converters, reverse=True)
        groups.setdefault(key, Group(by_pattern.get(pattern or ""))).sources.append((name, pattern))
    in_files: list[Any] = []
    for key, group in groups.items():
        sources = [tensors[name] for name, _ in group.sources]
        if group.converter is None:
            in_files.append((rename_source_key(key, renamings, [])[0], sources[0]))
            continue
        empty = [torch.empty(full_shape(t), dtype=t.dtype, device="meta") for t in sources]
        parts = Parts(sources, partial(group.convert, model, key))
        for name, part in group.convert(model, key, empty).items():
            deferred = Deferred(part.shape, part.dtype, partial(parts.read, name))
            in_files.append((rename_source_key(name, renamings, [])[0], deferred))
    return in_files


class Parts:
    """The tensors that some weights become, from when the first is read until all have been."""

    def __init__(self, sources: list[Any], convert: Callable[[list[Tensor]], dict[str, Tensor]]) -> None:
        self.sources = sources
        self.convert = convert
        self.converted: dict[str, Tensor] = {}

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Return one part; where weights are sharded, all ranks must call this together."""
        if name not in self.converted:
            with whole_tensors(self.sources) as whole:
                self.converted = self.convert(whole)
        return self.converted.pop(name)
