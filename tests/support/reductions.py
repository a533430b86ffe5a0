"""Train two steps as one rank of two, and count the collectives that add up gradients in the second step."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlt_lightning.datamodules import StudentSFTData
from rlt_lightning.modules import SFTModule
from rlt_lightning.strategies import FSDP2


class Reductions(TorchDispatchMode):
    """Counts reductions of more than a thousand numbers, and the bytes that go into them."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::") and "reduce" in name:
            # Of those with separate outputs and inputs, the inputs come second.
            inputs = args[1] if name.endswith("_base_") else args[0]
            tensors = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
            if sum(x.numel() for x in tensors) > 1000:
                self.number += 1
                self.bytes += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


class Watch(Callback):
    """Counts the micro-batches and reductions of the second step."""

    def __init__(self) -> None:
        self.reductions = Reductions()
        self.micro_batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            enter = pl_module.sharding.micro_batch

            def count(last: bool) -> Any:
                self.micro_batches += 1
                return enter(last=last)

            pl_module.sharding.micro_batch = count
            self.reductions.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.reductions.__exit__(None, None, None)


def train(reduce_every_micro_batch: Any, model: str, rows: int, tokens: int) -> tuple[dict[str, int], Any]:
    """Return what the second step counted, and the module.

    Args:
        reduce_every_micro_batch: The setting of FSDP2.
        model: The model.
        rows: Rows of a step, of both ranks.
        tokens: Tokens of a micro-batch.
    """
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            devices=2,
            strategy=FSDP2(reduce_every_micro_batch=reduce_every_micro_batch),
            max_steps=2,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[watch],
        )
        module = SFTModule(model, micro_batch_tokens=tokens)
        data = StudentSFTData(
            source="chains",
            tags="r1",
            student_system_prompt="",
            num_embedded_rows=2 * rows,
            tokenizer=model,
            prompts_per_step=rows,
            output_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    counted = {"micro_batches": watch.micro_batches, "reductions": watch.reductions.number}
    return counted | {"reduced_bytes": watch.reductions.bytes}, module
