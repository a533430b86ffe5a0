"""Fused arithmetic in the blocks of a model: Liger's norms, rotations and SwiGLU, or torch.compile.

Both replace forwards of single modules, so hooks that gather sharded weights (FSDP2, ZeRO-3) run as before,
and other models of the same architecture stay as they are.
Each returns a function that undoes it, in case the check in `models.kernels` finds the model wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rlt_lightning.models.checks import Refused, relative_distance
from rlt_lightning.types import InputError

# Architectures whose norms multiply by the weight after rounding, as Liger's "llama" mode does.
LIGER_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROTATION = "apply_rotary_pos_emb"


def blocks(model: Any) -> list[nn.Module]:
    """Return the transformer's blocks: the modules that transformers never splits."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]


def use_liger(model: Any) -> Callable[[], None]:
    """Compute a model's norms, rotations and SwiGLU with Liger's kernels; return a function to undo it.

    Raises:
        InputError: If Liger is not installed, or is not right for the architecture.
    """
    functions = liger_functions()
    config = model.config.get_text_config()
    if config.model_type not in LIGER_ARCHITECTURES or config.hidden_act not in ("silu", "swish"):
        raise InputError(
            f"model.kernels.liger is for {', '.join(LIGER_ARCHITECTURES)} with SwiGLU, but this model is "
            f"{config.model_type} with {config.hidden_act}. Leave it out."
        )
    forwards: dict[Any, Callable[..., Any]] = {}
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            forwards[module] = partial(liger_norm, functions, module)
        elif kind.endswith("MLP"):
            forwards[module] = partial(liger_swiglu, functions, module)
        elif kind.endswith("Attention"):
            forwards[module] = with_rotation(module, functions.liger_rope)
    for module, forward in forwards.items():
        module.forward = forward

    def undo() -> None:
        for module in forwards:
            del module.forward

    return undo


def liger_functions() -> Any:
    """Return Liger's module of functions."""
    try:
        return import_module("liger_kernel.transformers.functional")
    except ImportError as error:
        raise InputError(
            "model.kernels.liger needs liger-kernel and Triton (pip install 'rlt-lightning[liger]'), but "
            f"importing them fails: {error}"
        ) from error


def liger_norm(functions: ModuleType, norm: Any, hidden: Tensor) -> Tensor:
    """Return the RMSNorm of hidden states; its backward pass does not overwrite the incoming gradient."""
    return functions.liger_rms_norm(hidden, norm.weight, norm.variance_epsilon, in_place=False)


def with_rotation(attention: nn.Module, rotation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention layer's forward with another function for its rotations.

    The forward looks the rotation up among the names of its file, which all models of the architecture
    share. So this is the same code with names of its own.

    Raises:
        Refused: If the forward does not use the rotation by its name, so that nothing would be replaced.
    """
    plain: Any = type(attention).forward
    code = getattr(plain, "__code__", None)
    if code is None or ROTATION not in code.co_names:
        raise Refused(f"the forward of {type(attention).__name__} does not call {ROTATION}")
    names = plain.__globals__ | {ROTATION: rotation}
    copy = FunctionType(code, names, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(copy, attention)


def liger_swiglu(functions: ModuleType, mlp: Any, hidden: Tensor) -> Tensor:
    """Return what an MLP with SwiGLU computes."""
    return mlp.down_proj(functions.liger_swiglu(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


@torch.inference_mode(False)
def liger_fault(functions: Any, config: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Compare values and gradients of Liger's functions with plain ones; return the fault, or None."""
    generator = torch.Generator().manual_seed(0)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    heads = (1, 24, config.num_attention_heads, size), (1, 24, config.num_key_value_heads, size)
    angles = torch.randn(1, 24, size // 2, generator=generator).repeat(1, 1, 2).to(device)
    cos, sin, epsilon = angles.cos().to(dtype), angles.sin().to(dtype), config.rms_norm_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()

    def rotation(q: Tensor, k: Tensor) -> Tensor:
        heads = torch.cat([q, k], dim=2)  # (1, L, heads, D)
        swapped = torch.cat([-heads[..., size // 2 :], heads[..., : size // 2]], dim=-1)
        return heads * cos.to(heads).unsqueeze(2) + swapped * sin.to(heads).unsqueeze(2)

    def liger_rotation(q: Tensor, k: Tensor) -> Tensor:
        # Liger's kernel writes into its arguments, which in a model are fresh too.
        turned = functions.liger_rope((q * 1).transpose(1, 2), (k * 1).transpose(1, 2), cos, sin)
        return torch.cat([x.transpose(1, 2) for x in turned], dim=2)

    cases: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "RMSNorm": (
            lambda x, w: functions.liger_rms_norm(x, w, epsilon, in_place=False),
            norm,
            (random(24, config.hidden_size), random(config.hidden_size)),
        ),
        "SwiGLU": (
            functions.liger_swiglu,
            lambda a, b: nn.functional.silu(a) * b,
            (random(24, config.intermediate_size), random(24, config.intermediate_size)),
        ),
        "RoPE": (liger_rotation, rotation, (random(*heads[0]), random(*heads[1]))),
    }
    for name, (fused, plain, inputs) in cases.items():
        if (distance := relative_distance(fused, plain, inputs)) is not None:
            return f"its {name} is off by {distance:.2g} of the result or a gradient"
    return None


def compile_blocks(model: Any) -> Callable[[], None]:
    """Compile the forward of every block with torch.compile; return a function to undo it.

    Raises:
        InputError: If ZeRO-3 gathers the weights of single layers, which a compiled block would not wait for.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise InputError(
            "model.kernels.compiled_blocks is for whole models and FSDP2, but DeepSpeed ZeRO-3 gathers "
            "weights layer by layer. Set it to false; model.kernels.liger works with ZeRO-3."
        )
    replaced = blocks(model)
    for block in replaced:
        block.forward = CompiledBlock(block)

    def undo() -> None:
        for block in replaced:
            del block.forward

    return undo


class CompiledBlock:
    """The compiled forward of a block, with gradient checkpointing where transformers would use it.

    transformers wraps a block's forward so that it is checkpointed; the function inside is compiled.
    """

    def __init__(self, block: Any) -> None:
        plain = type(block).forward
        while hasattr(plain, "__wrapped__"):
            plain = plain.__wrapped__
        self.block = block
        self.compiled = torch.compile(partial(plain, block), dynamic=True)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return what the block computes."""
        block = self.block
        if getattr(block, "gradient_checkpointing", False) and block.training:
            return block._gradient_checkpointing_func(partial(self.compiled, **options), *arguments)
        return self.compiled(*arguments, **options)
