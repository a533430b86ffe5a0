"""When a process of a run fails, all of them end within seconds, and rank 0 prints why as its last line.

start_watch     a rank that another process or a launcher has started    -> its thread connects to rank 0
watch_trainer   rank 0, before it starts others                          -> its thread listens
fail_run        any rank, on an exception                                -> all ranks end (see watch.py)
end_run         every rank, after a run that went well                   -> its thread ends
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script
from typing_extensions import override

from rlt_lightning.cli.failure import failure_of
from rlt_lightning.cli.watch import OtherRank, RankZero, Watch
from rlt_lightning.engines import EngineError
from rlt_lightning.models.announce import announce


class FailureReport(Callback):
    """Report an exception to the other ranks before anything is cleaned up, which may wait for them."""

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # All ranks get an EngineError together, and may yet write a checkpoint together.
        if watch is not None and not isinstance(exception, EngineError):
            watch.reports.append(failure_of(exception, watch.rank))


# This process's thread; None where a run has one process.
watch: Watch | None = None


def start_watch(rank: int) -> None:
    """Start the thread of a rank that another process or a launcher has started; do nothing on rank 0."""
    global watch
    if rank > 0:
        watch = OtherRank(rank)
        watch.start()


def watch_trainer(trainer: Trainer) -> None:
    """Start rank 0's thread before other processes start; do nothing if there will be none."""
    global watch
    if trainer.world_size == 1:
        return
    last = trainer.world_size - 1
    announce(f"waiting for {'rank 1' if last == 1 else f'ranks 1 to {last}'} to start")
    # Lightning's own observer kills rank 0 without a word when a child has failed.
    subprocess_script._launch_process_observer = lambda child_processes: None
    known = watch or RankZero(one_node=trainer.num_nodes == 1)
    known.rank, known.world_size = trainer.global_rank, trainer.world_size
    known.launcher = trainer.strategy.launcher
    if TorchElasticEnvironment.detect() or SLURMEnvironment.detect():
        known.outlast_launcher()
    if watch is None:
        watch = known
        watch.start()


def end_run() -> None:
    """End this process's part of a run that went well."""
    if watch is not None:
        watch.end_run()


def fail_run(error: BaseException) -> None:
    """End the run on all ranks; return only where the run has no other process."""
    if watch is not None:
        watch.fail_run(failure_of(error, watch.rank))
