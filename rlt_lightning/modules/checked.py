"""At the start of a run, choose and check kernels and the layout of rows for each model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlt_lightning.models.kernels import fuse_blocks, prepare_model, steps_fused
from rlt_lightning.models.packed import verified_layout
from rlt_lightning.modules.frozen import FrozenModel
from rlt_lightning.numerics.divergence import Divergence

# Calls a model: run(function, *arguments) is function(model, *arguments). Each `module` below is a
# PolicyModule, which cannot be imported here: its file imports this one.
Run = Callable[..., Any]


def check_model(
    module: Any,
    run: Run,
    name: str,
    trained: bool = False,
    exact_kl: bool = False,
) -> None:
    """Choose kernels and a layout in which a model is right, and name the kernels in the log.

    The check runs in the run's precision: under bf16-mixed it checks the kernels for bfloat16. `exact_kl`
    says whether the exact KL is computed with the model's head; the module, which divergence it minimises.
    """
    more = ""
    if trained and module.trainer.training and module.optimizer_config.states != "8bit":
        more = "fused AdamW" if fused_adamw(module) else ""
    with module.trainer.precision_plugin.forward_context():
        device = module.trainer.strategy.root_device
        # All models share the options: once a check has failed, no head is compiled. A compiled head that
        # an earlier check has chosen is not what the user asked for, which would be an error if it failed.
        head = module.head if module.head.compiled is False else module.wanted_head
        divergence = Divergence("forward") if exact_kl else getattr(module, "head_loss", None)
        module.head = prepare_model(run, name, module.kernels, head, device, more, divergence)
        chosen = module.attn_implementation is not None
        module.layout = verified_layout(run, name, module.layout, chosen)


def get_frozen_ready(module: Any, readers: list[tuple[str, FrozenModel]]) -> None:
    """Place the frozen models that read completions and the reference; only the readers choose a layout.

    The reference is fused like the policy, so that their log-probs are equal where their weights are.
    """
    for frozen in (*(reader for _, reader in readers), module.reference):
        if frozen is not None:
            frozen.place(module.device, module.sharding)
    if module.reference is not None:
        precision, device = module.trainer.precision_plugin, module.trainer.strategy.root_device
        with module.reference.on(module.device) as run, precision.forward_context():
            fuse_blocks(run, module.pretrained, module.kernels, device)
    exact_kl = getattr(getattr(module, "reward", None), "kl_estimator", "") == "exact"
    for name, reader in readers:
        with reader.on(module.device) as run:
            check_model(module, run, name, exact_kl=exact_kl)


def fused_adamw(module: Any) -> bool | None:
    """Return whether AdamW steps all weights in one pass; None: PyTorch's choice."""
    device = module.trainer.strategy.root_device
    return steps_fused(module.kernels, device, module.sharding.steps_on_cpu)
