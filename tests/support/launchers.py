"""Options that start runs of two processes: by torchrun, also on two nodes, and under each strategy."""

from __future__ import annotations

from rlt_lightning.engines.launch import find_free_port

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
TORCHRUN += ("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")  # any free port
STRATEGIES = {
    "ddp": ["--trainer.strategy=ddp"],
    "fsdp2": ["--config=configs/hardware/fsdp2.yaml"],
    "zero3": ["--config=configs/hardware/zero3.yaml"],
}


def two_nodes() -> list[str]:
    """What torchrun gets on each of two nodes of one process, as docs/hardware.md has it."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--local-addr=127.0.0.1"]
    return [*options, "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{find_free_port()}", "--rdzv-id=job"]
