"""Strategies that shard a run over processes: FSDP2 and DeepSpeed ZeRO; any of them reads any checkpoint.

Names such as `fsdp2` or `deepspeed_stage_3` for `trainer.strategy` select these classes, also in an
unmodified Lightning Trainer.
"""

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from rlt_lightning.strategies.fsdp2 import FSDP2
from rlt_lightning.strategies.zero import DeepSpeed

__all__ = ["FSDP2", "DeepSpeed"]

OFFLOAD: dict[str, Any] = {"offload_optimizer": True, "offload_parameters": True, "pin_memory": True}
NAMED: dict[str, tuple[type, dict[str, Any]]] = {
    "fsdp2": (FSDP2, {}),
    "deepspeed": (DeepSpeed, {}),
    "deepspeed_stage_1": (DeepSpeed, {"stage": 1}),
    "deepspeed_stage_2": (DeepSpeed, {"stage": 2}),
    "deepspeed_stage_2_offload": (DeepSpeed, {"stage": 2, "offload_optimizer": True, "pin_memory": True}),
    "deepspeed_stage_3": (DeepSpeed, {"stage": 3}),
    "deepspeed_stage_3_offload": (DeepSpeed, {"stage": 3, **OFFLOAD}),
}
for name, (strategy, options) in NAMED.items():
    StrategyRegistry.register(name, strategy, override=True, **options)
