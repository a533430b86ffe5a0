"""Low-rank adapters (LoRA, arXiv:2106.09685) by peft's layers, in models that are whole or sharded.

An adapted layer computes W x + (alpha / rank) B A x, Eq. 3, where only A and B are trained. peft replaces
single layers, so the model keeps its class, its configuration and its blocks. The experts of a mixture,
stacked in one parameter, are not adapted.
"""

from __future__ import annotations

import copy
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlt_lightning.models.quantised import dequantised_weights, quantise
from rlt_lightning.models.weights import Deferred, NamedTensor, Read, full_shape, whole_tensors
from rlt_lightning.run.console import announce
from rlt_lightning.types import InputError, first_line, require_limits

# peft's name for an adapter that is the only one.
ADAPTER = "default"
ADAPTER_FILE = "adapter_model.safetensors"
# Types of models with Mamba's layers, as peft lists them.
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
# The prefix of names in adapter files.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoRA:
    """The layers that are adapted, and their rank.

    Example:
        `LoRA(rank=8, alpha=16, targets=["q_proj", "v_proj"])` adds 8 * (in + out) weights to each of them.

    Args:
        rank: Rows of A and columns of B.
        alpha: Updates are scaled by alpha / rank.
        targets: Names of the linear layers that are adapted, such as [q_proj, v_proj]; all-linear: all but
            the head.
        base: How the frozen weights are stored: full, in the model's type; 4bit: the linear layers in 4 bits
            (QLoRA), for one process or DDP.
    """

    rank: int = 32
    alpha: float = 64.0
    targets: list[str] | str = "all-linear"
    base: Literal["full", "4bit"] = "full"

    def __post_init__(self) -> None:
        limits = {
            "rank >= 1": self.rank >= 1,
            "alpha > 0": self.alpha > 0,
            "targets that name a layer": bool(self.targets),
        }
        require_limits(self, limits, "model.lora needs", "Correct it")


def add_adapter(model: Any, lora: LoRA, seed: int, read: Read | None = None) -> Read:
    """Add an adapter to a model and freeze all else; A and B are in fp32, whatever type the model has.

    Args:
        model: A model with weights, or an empty one on the meta device.
        lora: Which layers are adapted.
        seed: The seed of A's first values, which also depend on the layer's name, not on ranks or sharding.
        read: Returns the value of a weight by its name; needed for an empty model.

    Returns:
        A function like `read` for the adapted model. For a model with weights it knows only A and B, which
        have been filled already.

    Raises:
        InputError: If a target is no linear layer of the model, or its head.
    """
    empty = next(model.parameters()).is_meta
    sizes = {name: math.prod(full_shape(weight)) for name, weight in model.named_parameters()}
    # An empty model gives only names and shapes: of the original weights.
    if lora.base == "4bit" and not empty:
        quantise(model)
    inject_layers(model, lora, empty)
    announce_reach(model, sizes)
    shapes = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()
            shapes[name] = parameter.shape

    def value(name: str) -> Tensor:
        if name not in shapes:
            assert read is not None
            return read(unadapted_name(name))
        # On the CPU, whose generator draws the same on every machine: Lightning makes the GPU the default
        # device while a module loads its models.
        value = torch.zeros(shapes[name], device="cpu")
        if ".lora_A." in name:
            # Like peft: Kaiming uniform with a = sqrt(5).
            bound = 1 / math.sqrt(shapes[name][1])
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            value.uniform_(-bound, bound, generator=generator)
        return value

    if not empty:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_adapter(name):
                    parameter.copy_(value(name))
    return value


def announce_reach(model: Any, sizes: dict[str, int]) -> None:
    """Say which part of the weights an adapter reaches, and which are the largest that it does not.

    Args:
        model: The adapted model.
        sizes: How many numbers each weight of the model had before.
    """
    adapted = {f"{name}.weight" for name, _ in adapted_layers(model)}
    left, total = Counter[str](), sum(sizes.values())
    for name, size in sizes.items():
        if name not in adapted:
            parts = [part for part in name.split(".") if not part.isdigit() and part != "weight"]
            left[".".join(parts[-2:])] += size
    others = ", ".join(f"{name} {size / total:.0%}" for name, size in left.most_common(3))
    announce(f"model.lora reaches {1 - left.total() / total:.0%} of the weights; left out: {others}")


def inject_layers(model: Any, lora: LoRA, empty: bool) -> None:
    """Replace the target layers by peft's, and refuse targets that cannot be adapted."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import ParamWrapper

    layers, root = [lora.targets] if isinstance(lora.targets, str) else lora.targets, model
    if lora.targets == "all-linear":
        # Peft would adapt the experts and the router of some families in place of their linear layers, as it
        # takes the names for those of older files. It does so only for a model with a configuration.
        layers, root = list_linear_layers(model), nn.ModuleList([model])
        root.is_loaded_in_4bit = getattr(model, "is_loaded_in_4bit", False)  # type: ignore[assignment]
    elif not isinstance(lora.targets, str):
        linear = [name for name, layer in model.named_modules() if is_linear(layer)]
        unknown = [name for name in layers if not any(f".{layer}".endswith(f".{name}") for layer in linear)]
        if unknown:
            raise InputError(f"model.lora.targets must be names of linear layers, but {unknown} are none.")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=layers,
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, root, ADAPTER, low_cpu_mem_usage=empty)
    except ValueError as error:
        raise InputError(
            "model.lora.targets must be all-linear or names of linear layers of the model, but is "
            f"{lora.targets} ({first_line(error)}). Correct it."
        ) from error
    model.peft_config = root.peft_config
    if isinstance(model.get_output_embeddings(), adapted_layer_class()):
        raise InputError("model.lora.targets must leave the language-model head out, but names it. Drop it.")
    for name, layer in adapted_layers(model):
        # Peft takes some names for those of stacked experts in older files.
        if isinstance(layer, ParamWrapper) or not is_linear(layer.get_base_layer()):
            raise InputError(f"model.lora.targets must be linear layers, but {name} is none. Drop it.")
        layer._cast_input_dtype = cast_unless_autocast


def list_linear_layers(model: Any) -> list[str]:
    """Return the names of a model's linear layers, but the head and those that peft cannot adapt."""
    head = model.get_output_embeddings()
    # Mamba's kernels read the weight of its last layer themselves, so that an adapter there is idle.
    idle = ".out_proj" if model.config.model_type in MAMBA else "none"
    return [n for n, m in model.named_modules() if is_linear(m) and m is not head and not n.endswith(idle)]


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer multiplies with its weight and no more; routers that are subclasses do."""
    from transformers.pytorch_utils import Conv1D

    multiplies = type(layer).forward in (nn.Linear.forward, Conv1D.forward)
    # Falcon writes the product out; a layer with a quant_state is in 4 bits.
    return multiplies or type(layer).__name__ == "FalconLinear" or hasattr(layer, "quant_state")


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return peft's layers in a model, by name."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, adapted_layer_class())]


def cast_unless_autocast(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Give states the type of an adapter's weights, in place of peft's method.

    Under autocast both products are in half precision anyway. Peft's fp32 copy of each layer's input, and the
    copy back, then change no bit. On an H100 all copies together took a seventh of a 7B update.
    """
    return states if torch.is_autocast_enabled(states.device.type) else states.to(dtype)


def is_adapter(name: str) -> bool:
    """Return whether a weight of an adapted model is an A or a B."""
    return ".lora_A." in name or ".lora_B." in name


def unadapted_name(name: str) -> str:
    """Return the name that a weight had before the model was adapted."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def adapted_layer_class() -> type:
    """Return the class of the layers that peft puts into the model."""
    from peft.tuners.lora import LoraLayer

    return LoraLayer


def defer_merge(weight: Any, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Deferred:
    """Return a placeholder for W + scale * B A, which is computed when it is read.

    Args:
        weight: W, or a placeholder for it.
        a: (rank, in).
        b: (out, rank).
        scale: alpha / rank.
        transposed: Whether W is stored as (in, out).
    """

    @torch.no_grad()
    def merge() -> Tensor:
        """Compute the weight, in fp32; where weights are sharded, all ranks must call this together.

        It is computed where W is: W read from files, for a folder, is in main memory, while A and B are on
        the GPU. The CPU then computes what `rlt export` computes.
        """
        with whole_tensors([weight, a, b]) as [whole, whole_a, whole_b]:
            whole_a, whole_b = whole_a.to(whole.device).float(), whole_b.to(whole.device).float()
            update = scale * (whole_b @ whole_a)
            update = update.mT if transposed else update
            return (whole.float() + update).to(whole.dtype)

    return Deferred(torch.Size(full_shape(weight)), weight.dtype, merge)


def merge_weights(model: nn.Module, tensors: dict[str, Any]) -> list[NamedTensor]:
    """Return all weights with the adapter merged in, under their names before; a plain model's as they are.

    Args:
        model: The model, whose layers say what is adapted, and how.
        tensors: Its weights by name, or placeholders for them.
    """
    layers = {f"{name}.base_layer.weight": (name, layer) for name, layer in adapted_layers(model)}
    # Codes of 4 bits mean nothing to others; placeholders for original weights stay.
    whole = dequantised_weights(model)
    tensors = {n: whole.get(n, t) if isinstance(t, Tensor) else t for n, t in tensors.items()}
    merged: list[NamedTensor] = []
    for name, tensor in tensors.items():
        if name in layers:
            layer_name, layer = layers[name]
            a, b = (tensors[f"{layer_name}.lora_{matrix}.{ADAPTER}.weight"] for matrix in "AB")
            tensor = defer_merge(tensor, a, b, layer.scaling[ADAPTER], layer.fan_in_fan_out)
        if not is_adapter(name):
            merged.append((unadapted_name(name), tensor))
    return merged


def without_adapter(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(model, *arguments)` with the adapter switched off."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        # enable_adapters() would freeze A and B as well.
        layer._disable_adapters = True
    try:
        return function(model, *arguments)
    finally:
        for layer in layers:
            layer._disable_adapters = False


def list_adapter_weights(tensors: dict[str, Any]) -> list[NamedTensor]:
    """Return the weights A and B under the names in peft's files."""
    return [
        (PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."), tensor)
        for name, tensor in tensors.items()
        if is_adapter(name)
    ]


def save_adapter_config(model: Any, base: str, folder: Path) -> None:
    """Write the configuration that peft and vLLM read; `base` is the model that was adapted."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = copy.copy(model.peft_config[ADAPTER])
    # Peft takes the names of some linear layers for those of experts in older files. It adapts their weights
    # as what they are, by matrices of the same names, if they are called parameters.
    as_loaded = copy.deepcopy(config)
    convert_peft_config_for_transformers(as_loaded, model, None)
    mistaken = set(config.target_modules) - set(as_loaded.target_modules)
    config.target_modules = set(config.target_modules) - mistaken
    weights = [f"{name}.weight" for name in sorted(mistaken)]
    config.target_parameters = [*(config.target_parameters or []), *weights]
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(folder)
