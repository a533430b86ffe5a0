"""How a run is spread over processes: FSDP2 and DeepSpeed ZeRO, with checkpoints that any strategy reads."""

from rlt_lightning.strategies.fsdp2 import FSDP2
from rlt_lightning.strategies.zero import DeepSpeed

__all__ = ["FSDP2", "DeepSpeed"]
