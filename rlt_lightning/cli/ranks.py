"""When a process of a run fails, all of them end within seconds, and rank 0 tells why as its last line.

A thread of every rank holds a connection to rank 0's. The operating system closes it when a process ends in
whatever way, so a rank that was killed is missed at once, also where collectives would wait for it for ever.
Rank 0 judges which failure came first, tells all others, and is the last to end. A rank whose main thread
does not come back from a collective is ended by its thread.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import subprocess_script
from typing_extensions import override

from rlt_lightning.cli.failure import failure_of
from rlt_lightning.cli.watch import OtherRank, RankZero, Watch
from rlt_lightning.engines import EngineError


class FailureReport(Callback):
    """Tell the other ranks of an exception before anything is cleaned up, which may take a meeting."""

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # All ranks get an EngineError together, and may yet write a checkpoint together.
        if watch is not None and not isinstance(exception, EngineError):
            watch.reports.append(failure_of(exception, watch.rank))


watch: Watch | None = None  # of this process; None where it is alone


def join(rank: int) -> None:
    """Start the watch of a rank that another process, or a launcher, has started; nothing on rank 0."""
    global watch
    if rank > 0:
        watch = OtherRank(rank)
        watch.start()


def watch_over(trainer: Trainer) -> None:
    """Start rank 0's watch, before it starts other processes; nothing if there will be none."""
    global watch
    if trainer.world_size == 1:
        return
    # Lightning's own observer kills rank 0 without a word when a child has failed.
    subprocess_script._launch_process_observer = lambda child_processes: None
    known = watch or RankZero(one_node=trainer.num_nodes == 1)
    known.rank, known.world_size = trainer.global_rank, trainer.world_size
    known.launcher = trainer.strategy.launcher
    if watch is None:
        watch = known
        watch.start()


def leave() -> None:
    """End this process's part of a run that went well."""
    if watch is not None:
        watch.leave()


def fail(error: BaseException) -> None:
    """End the run on all ranks; returns where this process is alone."""
    if watch is not None:
        watch.fail(failure_of(error, watch.rank))
