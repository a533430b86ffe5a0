"""Keep a frozen base in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes: NF4 with double quantisation.

Every linear layer but the head is stored as 4-bit codes. A forward computes a layer's whole weight from them
and discards it afterwards; embeddings, norms and the head stay as they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from rlt_lightning.models.weights import Deferred
from rlt_lightning.types import InputError, missing_package

# Weights that share a scale, and scales that share a scale.
NF4_BLOCK, SCALE_BLOCK = 64, 256
# Per layer, in fp32: the 16 values of a code, the 256 of a scale's code, and the mean of the scales.
NF4_TABLES = 4 * (16 + 256 + 1)

# When bitsandbytes is imported, by us or by peft, it warns on some CPUs that a kernel is missing. `quantise`
# turns that kernel off.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)


def require_settings(lora: Any, optimizer: Any, whole: bool, installed: bool = True) -> None:
    """Refuse settings of bitsandbytes where they would not work.

    Args:
        lora: The adapter's settings, or None.
        optimizer: The optimizer's settings.
        whole: Whether every process holds all weights, and PyTorch steps them: one process, or DDP.
        installed: Whether the package must be installed; a plan does not need it.

    Raises:
        InputError: If a setting asks for what bitsandbytes cannot do here.
    """
    settings = {
        "model.lora.base 4bit": lora is not None and lora.base == "4bit",
        "model.optimizer.states 8bit": optimizer.states == "8bit",
    }
    for setting in [name for name, is_set in settings.items() if is_set]:
        if not whole:
            raise InputError(
                f"{setting} needs a strategy that keeps weights and optimizer states whole, but this one "
                "shards them or is DeepSpeed's. Use one device or trainer.strategy ddp, or drop the setting."
            )
        if installed and find_spec("bitsandbytes") is None:
            raise missing_package(setting, "bitsandbytes", "quant", "drop the setting")


@torch.no_grad()
def quantise(model: Any) -> None:
    """Replace the weights of a model's linear layers, all but the head, by 4-bit codes, layer by layer.

    The codes are computed on the CPU, so they are the same on every machine that trains.

    Raises:
        InputError: If the model has no linear layer but the head, or is quantised already.
    """
    if getattr(model, "is_quantized", False):
        raise InputError(
            "model.lora.base 4bit needs a model in full precision, but the files of this one are quantised "
            "already. Start from the original model."
        )
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, layer in quantisable_layers(model):
        with torch.device("meta"):
            small = Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None, quant_type="nf4"
            )
        codes: Any = Params4bit(layer.weight.data, quant_type="nf4", module=small)
        small.weight = codes.to("cpu")
        small.bias = layer.bias
        # On some CPUs an evaluation would repack the codes in place, which then could not be read back.
        small.support_avx512bf16_for_cpu = False
        model.set_submodule(name, small.train(layer.training))
        del layer.weight  # frees it before the next layer
    # peft reads it.
    model.is_loaded_in_4bit = True


def quantisable_layers(model: Any) -> list[tuple[str, nn.Linear]]:
    """Return the layers that `quantise` replaces, by name."""
    head = model.get_output_embeddings()
    layers = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    if not layers:
        raise InputError(
            "model.lora.base 4bit needs a model of linear layers (torch.nn.Linear), but this one has none "
            "beside its head. Set it to full."
        )
    return layers


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers whose weights are in 4 bits, by name."""
    return ((n, m) for n, m in model.named_modules() if getattr(m, "quant_state", None) is not None)


def dequantised_weights(model: nn.Module) -> dict[str, Deferred]:
    """Return a placeholder for each weight in 4 bits: the whole matrix that its layer multiplies with."""
    weights = {}
    for name, layer in quantised_layers(model):
        state = layer.quant_state
        weights[f"{name}.weight"] = Deferred(torch.Size(state.shape), state.dtype, partial(dequantise, layer))
    return weights


def dequantise(layer: Any) -> Tensor:
    """Compute the whole weight of a layer in 4 bits, in the type that it had before."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.quant_state)


def without_frozen(state: dict[str, Any], frozen: set[str]) -> dict[str, Any]:
    """Return a state dict without frozen weights, and without the scales of those in 4 bits."""
    # A scale is named after its weight, as in weight.absmax.
    owners = {name: name.partition(".weight.")[0] + ".weight" for name in state if ".weight." in name}
    return {n: t for n, t in state.items() if n not in frozen and owners.get(n) not in frozen}


def nf4_bytes(numel: int) -> int:
    """Return the bytes of one layer's weight in 4 bits, with its scales and tables."""
    scales = math.ceil(numel / NF4_BLOCK)
    return math.ceil(numel / 2) + scales + 4 * math.ceil(scales / SCALE_BLOCK) + NF4_TABLES
