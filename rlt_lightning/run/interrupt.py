"""Signals that end a run: Ctrl-C (SIGINT), SIGTERM, and SIGUSR1 by which SLURM asks it to queue again.

In a fit they end nothing by themselves: they may come in the middle of a collective, or to one rank alone.

    signal ─▶ Signals notes it, on this rank
              an iteration or a validation ends ─▶ Interrupt: has any rank noted one? Then Checkpoint saves
              the last finished iteration, and Interrupted is raised on all ranks
                which is a SystemExit: of status 130, or 143 after SIGTERM; 0 on other ranks, since Lightning
                and `srun --kill-on-bad-exit` kill rank 0 for that of another one
              SLURM's: rank 0 then puts the job into the queue again, and the status is 143

A second Ctrl-C ends the process at once. A second SIGTERM does nothing: a process gets several within
moments, since `timeout` and SLURM send it to a whole group, whose members, such as torchrun, pass it on; and
all of them send SIGKILL in the end. Workers that got it too are not waited for. In other verbs SIGTERM ends
the process at once: their rows are on disk.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

TERMINATED = 128 + signal.SIGTERM  # exit status
REQUEUE = signal.SIGUSR1  # whatever SLURMEnvironment.requeue_signal is


class Interrupted(SIGTERMException):
    """Raised on all ranks after the same iteration. A KeyboardInterrupt would let Lightning kill them."""


class Signals(_SignalConnector):
    """Lightning's handlers, except that they only note a signal; Lightning's wait for the other ranks.

    Attributes:
        noted: The signals that have come to this process since the last fit began.
    """

    noted: ClassVar[set[int]] = set()

    @override
    def register_signal_handlers(self) -> None:
        super().register_signal_handlers()
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.noted.clear()
            self._register_signal(signal.SIGINT, self._note_ctrl_c)

    @override
    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        self._note(signal.SIGTERM, "terminated: the run stops after this iteration.")

    @override
    def _slurm_sigusr_handler_fn(self, signum: Any, _: Any) -> None:
        self._note(REQUEUE, "SLURM asks for a requeue: the run stops after this iteration.")

    def _note_ctrl_c(self, signum: Any, _: Any) -> None:
        # The system's handler ends even a process that is in the middle of a forward. In an interactive
        # session it would end the session.
        before = self._original_handlers[signal.SIGINT]
        self._register_signal(signum, before if hasattr(sys, "ps1") else signal.SIG_DFL)
        self._note(signal.SIGINT, "interrupted: the run stops after this iteration. Again: it ends at once.")

    def _note(self, number: int, line: str) -> None:
        is_first = number not in self.noted
        self.noted.add(number)
        if self.trainer.state.fn != TrainerFn.FITTING:
            # Whoever scores within a training that they wrote may have a handler, which Lightning calls next.
            if self._original_handlers[signal.SIGTERM] in (None, signal.SIG_DFL):
                self._register_signal(signal.SIGTERM, signal.SIG_IGN)
                self._tell("terminated. Rows that are written are kept.")
                raise SIGTERMException(TERMINATED)
        elif is_first:
            self._tell(line)

    def _tell(self, line: str) -> None:
        if self.trainer.is_global_zero:
            # Not print(), which this may have interrupted.
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\nrlt: {line}\n".encode())

    @override
    def teardown(self) -> None:
        """Restore the earlier handlers of signals; if SLURM has asked for it, first queue the job again."""
        if REQUEUE in self.noted and self.trainer.is_global_zero:
            subprocess.run('scontrol requeue "$SLURM_JOB_ID"', shell=True)
        super().teardown()


def is_terminated() -> bool:
    """Return whether this process was told to end, so that nothing that takes long should begin."""
    return bool(Signals.noted - {signal.SIGINT})


class Interrupt(Callback):
    """Stop all ranks after the iteration, or the validation, in which a signal has come to one of them.

    So it does where a callback of one of them has set `trainer.should_stop`: Lightning would leave the others
    waiting. Its hooks come after those of a user's callbacks and before those of checkpoints.

    Every module's `configure_callbacks` returns it, so that this works in scripts too.

    Args:
        trainer: Its handlers of signals are replaced.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.signals = trainer._signal_connector = Signals(trainer)
        # Whether a validation has come since the last iteration ended.
        self.has_validated = False

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.has_validated:
            self.has_validated = False
            self.stop_together(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stop_together(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = on_any_rank(trainer, trainer.should_stop)
        self.has_validated = True

    def stop_together(self, trainer: Trainer) -> None:
        """Let all ranks stop if one is to; all ranks call this together.

        Raises:
            Interrupted: If any rank has noted a signal.
        """
        noted = self.signals.noted
        if not on_any_rank(trainer, trainer.should_stop or bool(noted)):
            return
        trainer.should_stop = on_any_rank(trainer, trainer.should_stop)
        numbers = (signal.SIGINT, signal.SIGTERM, REQUEUE)
        noted.update(number for number in numbers if on_any_rank(trainer, number in noted))
        if not noted:
            return
        for checkpoint in trainer.checkpoint_callbacks:
            if hasattr(checkpoint, "save_finished_iteration"):  # now: rollouts in flight belong to it
                checkpoint.save_finished_iteration(trainer)
        only_ctrl_c = noted == {signal.SIGINT}
        if trainer.is_global_zero:
            print(
                f"\nrlt: {'interrupted' if only_ctrl_c else 'terminated'}. The run stopped after iteration "
                f"{trainer.global_step}. Set resume to true to resume it in {trainer.default_root_dir}.",
                file=sys.stderr,
            )
            raise Interrupted(128 + signal.SIGINT if only_ctrl_c else TERMINATED)
        raise Interrupted(0)


def on_any_rank(trainer: Trainer, flag: bool) -> bool:
    """Return whether a flag is set on any rank; all ranks call this together."""
    return trainer.strategy.reduce_boolean_decision(flag, all=False)
