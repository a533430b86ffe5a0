"""Options that start runs of two processes: by torchrun, and under each strategy."""

from __future__ import annotations

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
TORCHRUN += ("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")  # any free port
STRATEGIES = {
    "ddp": ["--trainer.strategy=ddp"],
    "fsdp2": ["--config=configs/hardware/fsdp2.yaml"],
    "zero3": ["--config=configs/hardware/zero3.yaml"],
}
