"""Run two nodes on one machine."""

from __future__ import annotations

from commands import ROOT

from rlt_lightning.engines.launch import find_free_port

OVERLAYS = ROOT / "configs" / "hardware"


def options(model: str, *overlays: str) -> list[str]:
    return [
        *("--config=tests/rlt.yaml", *(f"--config={OVERLAYS / name}.yaml" for name in overlays)),
        *(f"--model.teacher={model}", f"--model.student={model}", "--data.num_embedded_rows=8"),
        *("--rollouts.sampling.max_completion_length=16", "--trainer.devices=1"),
    ]


def two_nodes() -> list[str]:
    """What torchrun gets on each of two nodes of one process, as docs/hardware.md has it."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--local-addr=127.0.0.1"]
    return [*options, "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{find_free_port()}", "--rdzv-id=job"]
