"""torchrun may start a failed run again. Its agent ends all processes when one has failed, and repeats them:

    torchrun --max-restarts 3      rank 1 is killed             all ranks start again, with the same words:
    agent ── starts ranks 0, 1 ──▶ the agent ends rank 0 ─────▶ --resume true finds the newest checkpoint,
                                                                or starts over if there is none

What a restarted run does follows only from its run folder. Each node's agent counts its own restarts, so the
number is good for a message and not for a decision.
"""

from __future__ import annotations

import os

from rlt_lightning.console import announce
from rlt_lightning.types import InputError


def count_restarts() -> int:
    """Return how often torchrun may start the processes again; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def require_restartable(resume: bool) -> None:
    """Check that the run continues if torchrun starts its processes again.

    Raises:
        InputError: If they would refuse the run's own folder, or call the processes that they replace.
    """
    if not count_restarts():
        return
    if not resume:
        raise InputError(
            "A run that torchrun may restart (--max-restarts) needs --resume true, so that the restarted "
            "processes continue it. Add it; the first start then begins a new run."
        )
    # PyTorch's agent keeps this store, and with it the addresses of processes that have ended.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise InputError(
            "A run that torchrun may restart (--max-restarts) needs a new store for each start, but PyTorch "
            "keeps the old one. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun; on several nodes also "
            "--rdzv-backend c10d with --rdzv-endpoint in place of --master_addr and --node_rank."
        )


def announce_restart() -> None:
    """Say that torchrun has started the processes again."""
    if count := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        announce(f"torchrun has restarted all processes: restart {count} of at most {count_restarts()}")
