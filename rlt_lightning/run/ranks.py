"""Let all processes of a run end together, within seconds, and those of one node connect on the loopback.

Lightning starts ranks 1, 2, … as children of rank 0. torchrun and SLURM start all ranks, and end all when one
fails. Every module's `configure_callbacks` returns `EndTogether`, so that this works in scripts too.

    rank 1 raises             prints why and ends       ──▶ rank 0 sees the status of its child, ends with it
    rank 1 is killed          says nothing              ──▶ rank 0 says so, and ends
    rank 0 ends, however                                ──▶ the kernel kills its children
    a collective fails        mostly since another rank has ended: the launcher then ends this process
                              or another rank is late: it prints where it is, and this process raises
    all ranks raise the same  the first to enter its number into the store prints it
    the others wait for it    they get the exception and raise it too, but let the rank print it where it
                              was raised: `Collectives.on_rank_zero`, `raise_from_ranks`

Elsewhere there is no broadcast of a failure, since the other ranks sit in other collectives.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path
from subprocess import Popen
from typing import Any, NoReturn, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from typing_extensions import override

from rlt_lightning.console import announce, waiting_for
from rlt_lightning.gloo import LOOPBACK, LOOPBACK_INTERFACE
from rlt_lightning.run.folder import remove_empty_folders
from rlt_lightning.run.interrupt import TERMINATED, Interrupt, is_terminated
from rlt_lightning.run.jsonl import Row, append_rows
from rlt_lightning.types import InputError

T = TypeVar("T")

FIRST_FAILURE = "rlt_lightning/first_failure"  # in the store: the rank that failed first
PR_SET_PDEATHSIG = 1  # of prctl
PRINT_S = 0.5  # for a process to print its stack
# Begins the note on an exception that another rank has raised.
HEARD = "This rank raises what was raised on rank"
# How long a rank waits to be ended because another one has failed, or may clean up after its own failure.
GRACE_S = 4.0
# The remedy for a job of one node, whose stages may need different numbers of processes.
INTERACTIVE = "SLURM_JOB_NAME=interactive, so that Lightning starts the processes of one node itself"
# By these a process knows its rank.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK")
# Rank 0's process, if Lightning's launcher has started this one.
parent: int | None = None


class EndTogether(Callback):
    """End this rank when another one fails, and say why once; a module's `configure_callbacks` makes it.

    It is made when Lightning has started the ranks and they have not met yet. Its hooks come after those of a
    user's callbacks and before those of checkpoints.

    Args:
        trainer: Knows the ranks.
        together: An exception that all ranks raise together, and after which they meet once more.
    """

    def __init__(self, trainer: Trainer, together: type[Exception]) -> None:
        self.together = together
        self.store = meet_on_loopback(trainer)
        self.children = getattr(trainer.strategy.launcher, "procs", [])
        # Set once this process ends without being told to.
        self.ends = threading.Event()
        end_with_parent()
        if self.children:
            faulthandler.register(signal.SIGUSR1, all_threads=False)
        for rank, child in enumerate(self.children, trainer.global_rank + 1):
            threading.Thread(target=self.watch_child, args=(child, rank), daemon=True).start()

    def watch_child(self, child: Popen[bytes], rank: int) -> None:
        """End this process once a child has failed; a child that was not killed has said why.

        Lightning's own observer, which looks every 5 s, would kill this process.
        """
        status = child.wait()
        if status and not self.ends.is_set():
            if status in (TERMINATED, -signal.SIGTERM):  # this process says how to resume, unless it hangs
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(GRACE_S)
                status = TERMINATED
            if status < 0:
                killed_by = signal.Signals(-status).name
                print(f"rlt: error: rank {rank}: It was ended by {killed_by}.", file=sys.stderr)
            end_process(max(status, 1))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, Exception) or isinstance(exception, self.together):
            self.ends.set()
            return
        if was_heard(exception):
            wait_to_be_ended()
        else:
            if is_broken_collective(exception):
                wait_to_be_ended()
                self.print_stacks_of_others()
            let_first_speak()
        self.ends.set()
        ErrorHandler().record_exception(exception)  # for torchrun's table
        end_after_traceback()
        timer = threading.Timer(GRACE_S, end_if_cleaning_up, args=(trainer,))
        timer.daemon = True
        timer.start()

    def print_stacks_of_others(self) -> None:
        """Let the late ranks that this process can reach print where they are."""
        for pid in [parent] if parent else [child.pid for child in self.children]:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(PRINT_S)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """After a successful run, wait until no rank needs another; then let this process continue alone."""
        trainer.strategy.barrier()
        self.ends.set()
        if parent:
            set_death_signal(0)


def make_ranks_end_together(trainer: Trainer, together: type[Exception]) -> list[Callback]:
    """Return the callbacks that every module needs; `together` is as in EndTogether.

    Raises:
        InputError: If the launcher has not started all ranks.
    """
    if trainer.num_devices * trainer.num_nodes > 1:  # else each process may score rows of its own
        require_processes(trainer)
    is_alone = trainer.world_size == 1
    return [Interrupt(trainer), *([] if is_alone else [EndTogether(trainer, together)])]


def require_tasks() -> None:
    """Check that SLURM says how many tasks a node has, which Lightning must know.

    Raises:
        InputError: If it does not.
    """
    try:
        if SLURMEnvironment.detect():
            SLURMEnvironment()
    except RuntimeError as error:
        raise InputError(f"{error} Or set {INTERACTIVE}.") from error


def require_processes(trainer: Trainer) -> None:
    """Check that a launcher has started a process for each device of each node.

    Raises:
        InputError: If it has not: DDP and ZeRO-3 would train with fewer, or wait for the others.
    """
    environment = trainer._accelerator_connector.cluster_environment
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if not environment.creates_processes_externally:
        if nodes == 1:
            require_first()
        return
    started, remedy = environment.world_size(), f"Start {devices} on each node, such as by torchrun"
    if isinstance(environment, SLURMEnvironment):
        remedy = f"Start them by `srun --ntasks-per-node={devices}`, or set {INTERACTIVE}"
        if "SLURM_JOB_ID" in os.environ:  # without srun the script of the job is one process
            started = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if started != devices * nodes:
        raise InputError(
            f"trainer.devices {devices} on trainer.num_nodes {nodes} need {devices * nodes} processes, but "
            f"the launcher has started {started}. {remedy}."
        )
    try:
        if started > 1:
            environment.validate_settings(devices, nodes)
    except ValueError as error:
        raise InputError(str(error)) from error
    if started == 1:
        require_first()


def require_first() -> None:
    """Check that this process is rank 0, whatever has set the variables of its environment.

    Raises:
        InputError: If it is not: Lightning would write no metrics, and nothing would lock the folder.
    """
    if wrong := [name for name in RANKS if int(os.environ.get(name, "0"))]:
        raise InputError(
            f"A run of which Lightning starts all processes must begin as rank 0, but {wrong[0]} is "
            f"{os.environ[wrong[0]]}. Unset {', '.join(wrong)}, or start all processes by torchrun."
        )


def end_with_parent() -> None:
    """Let the kernel kill this process when rank 0 ends, if Lightning has started it as a child of rank 0."""
    global parent
    # Lightning's launcher sets WORLD_SIZE; the end of a run deletes it.
    launched = os.environ.get("LOCAL_RANK", "0") != "0" and "WORLD_SIZE" in os.environ
    if launched and not TorchElasticEnvironment.detect():
        parent = os.getppid()
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    if parent:
        set_death_signal(signal.SIGKILL)


def set_death_signal(number: int) -> None:
    """Set the signal that the kernel sends when the parent ends; 0: none. Only Linux has it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def meet_on_loopback(trainer: Trainer) -> distributed.TCPStore | None:
    """Let the ranks of one node meet on the loopback; PyTorch would listen on all interfaces.

    Returns:
        On rank 0 the store that PyTorch will take for its own, since it has the same port.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    # With these, MASTER_ADDR is the address at which the ranks meet.
    known = (LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment)
    if trainer.num_nodes > 1 or not isinstance(environment, known) or distributed.is_initialized():
        return None
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    # torchrun's own store listens where torchrun says.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    os.environ["MASTER_ADDR"] = LOOPBACK
    if trainer.global_rank:
        return None
    listener = socket.create_server((LOOPBACK, environment.main_port))
    return distributed.TCPStore(
        LOOPBACK,
        environment.main_port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def is_broken_collective(error: Exception) -> bool:
    """Return whether a rank failed because another one has ended or is late."""
    gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return gloo or isinstance(error, distributed.DistError)


def was_heard(error: Exception) -> bool:
    """Return whether an exception comes from another rank, which prints it there."""
    return any(note.startswith(HEARD) for note in getattr(error, "__notes__", ()))


def let_first_speak() -> None:
    """Return on the rank that failed first; the others wait until the launcher ends them."""
    if not distributed.is_initialized():
        # Rank 0 of torchrun or SLURM has read the same settings.
        if parent is None and is_one_of_several() and find_global_rank():
            wait_to_be_ended()
        return
    rank = str(distributed.get_rank())
    store: Any = distributed.distributed_c10d._get_default_store()
    try:
        is_first = store.compare_set(FIRST_FAILURE, "", rank).decode() == rank
    except distributed.DistError:  # rank 0, which holds the store, has ended
        is_first = False
    if not is_first:
        wait_to_be_ended()


def wait_to_be_ended() -> None:
    """Wait until this process is ended because another one has failed; return after GRACE_S."""
    if is_terminated():
        end_process(1)
    # What has been set for a fit would only note it.
    signal.signal(signal.SIGTERM, lambda *_: end_process(1))
    time.sleep(GRACE_S)


def find_global_rank() -> int:
    """Return the rank of this process, which its launcher has set; 0 before anything is launched."""
    # The largest: processes that Lightning starts inherit a RANK of 0, and LOCAL_RANK is 0 on each node.
    return max(int(os.environ.get(name, "0")) for name in RANKS)


def is_one_of_several() -> bool:
    """Return whether a launcher has started this process, or this one has started others."""
    return "LOCAL_RANK" in os.environ or SLURMEnvironment.detect()


def end_after_traceback() -> None:
    """Let the process end as soon as Python has printed an exception; its exit takes seconds and may hang."""
    print_traceback = sys.excepthook

    def print_and_end(*error: Any) -> None:
        print_traceback(*error)
        end_process(1)

    sys.excepthook = print_and_end


def end_if_cleaning_up(trainer: Trainer) -> None:
    """End a failed process in which Lightning still cleans up: that may wait for ranks that have ended."""
    if trainer.state.stage is not None:
        end_process(1)


def choose_status(status: int) -> int:
    """Return the exit status of a rank that stops with all others: 0 if rank 0 would be killed for it.

    Lightning does so for a child's, and `srun --kill-on-bad-exit`.
    """
    is_other_task = SLURMEnvironment.detect() and find_global_rank() > 0
    return 0 if parent or is_other_task else status


def end_process(status: int) -> NoReturn:
    """End at once, without the cleaning up that may wait for ranks that have ended."""
    remove_empty_folders()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Collectives:
    """Lets ranks wait for each other in a process group of its own; the strategy's would give up earlier.

    Args:
        deadline_s: How long a rank waits for the others.
        together: An exception that all ranks raise together, and after which they meet once more.
    """

    def __init__(self, deadline_s: float, together: type[Exception]) -> None:
        self.deadline_s = deadline_s
        self.together = together, InputError
        # The process group in which ranks wait, made by the first call of all ranks.
        self.group: Any = None

    def on_rank_zero(
        self, trainer: Trainer, function: Callable[[], T], what: str = "rank 0, which talks to the engine"
    ) -> T:
        """Call a function on rank 0, and return its result on all ranks.

        Args:
            trainer: Knows this process's rank.
            function: What rank 0 does; its result is pickled.
            what: What the other ranks wait for, as a message shows it.

        Raises:
            Exception: On every rank, whichever the function raised.
        """
        if trainer.world_size == 1:
            return function()
        self._open()
        if trainer.is_global_zero:
            try:
                result = function()
            except Exception as error:
                self._tell(trainer, error)
                raise
            self._broadcast(trainer, (result, None), what)
            return result
        result, failure = self._broadcast(trainer, None, what)
        if failure is not None:
            raise add_heard(failure, 0)
        return result

    def gather(self, trainer: Trainer, value: T, what: str) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank; `what` is waited for."""
        if trainer.world_size > 1:
            self._open()
        return gather_from_ranks(trainer, value, what, self.group)

    def _tell(self, trainer: Trainer, error: Exception) -> None:
        """Tell the other ranks of a failure on rank 0, as far as they come to hear it.

        A bug may have left them in another collective: rank 0 then fails after GRACE_S, and they end with it.
        """
        told = (None, to_sendable(error))
        telling = threading.Thread(
            target=self._broadcast, args=(trainer, told, "the other ranks"), daemon=True
        )
        telling.start()
        telling.join(None if isinstance(error, self.together) else GRACE_S)

    def _broadcast(self, trainer: Trainer, value: Any, what: str) -> Any:
        outcome = [value]
        with waiting_for_ranks(trainer, what, "the other ranks"):
            distributed.broadcast_object_list(outcome, src=0, group=self.group)
        return outcome[0]

    def _open(self) -> None:
        if self.group is None:
            timeout = timedelta(seconds=self.deadline_s)
            self.group = distributed.new_group(backend="gloo", timeout=timeout)


def raise_from_ranks(trainer: Trainer, error: Exception | None) -> NoReturn:
    """Raise on all ranks the exception of the first one that has one; all ranks call this together.

    Args:
        trainer: Knows the ranks.
        error: What failed on this rank; None: another one has failed.
    """
    sendable = None if error is None else to_sendable(error)
    failures = gather_from_ranks(trainer, sendable, "what failed on another rank")
    rank, failure = next((rank, failure) for rank, failure in enumerate(failures) if failure is not None)
    if error is not None and rank == trainer.global_rank:
        raise error
    raise add_heard(failure, rank)


def add_heard(error: Exception, rank: int) -> Exception:
    """Note on an exception that it was raised on another rank."""
    error.add_note(f"{HEARD} {rank}: that rank's traceback shows where.")
    return error


def to_sendable(error: Exception) -> Exception:
    """Return an exception that other ranks can raise: itself or, if it cannot be pickled, its message."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of the user's does
        copy = None
    return error if isinstance(copy, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def gather_from_ranks(trainer: Trainer, value: T, what: str, group: Any = None) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank; all ranks call this together.

    Args:
        trainer: Knows the ranks.
        value: What this rank gives; it is pickled, so tensors must be on the CPU.
        what: What is waited for, as a message shows it.
        group: The process group; None: the strategy's.
    """
    if trainer.world_size == 1:
        return [value]
    parts: list[Any] = [None] * trainer.world_size
    with waiting_for_ranks(trainer, what):
        distributed.all_gather_object(parts, value, group=group)
    return parts


def append_from_ranks(trainer: Trainer, path: Path, rows: list[Row]) -> None:
    """Append the rows of all ranks to a JSONL file, in rank order; rank 0 alone gets them, and writes."""
    parts: list[Any] = [rows] * trainer.world_size
    if trainer.world_size > 1:
        with waiting_for_ranks(trainer, "the rows of all ranks"):
            distributed.gather_object(rows, parts if trainer.is_global_zero else None)
    if trainer.is_global_zero:
        append_rows(path, chain.from_iterable(parts))


def waiting_for_ranks(
    trainer: Trainer, what: str, on_rank_zero: str | None = None
) -> AbstractContextManager[None]:
    """Say that this process waits for other ranks, once on each machine.

    Args:
        trainer: Knows this process's rank.
        what: What is waited for.
        on_rank_zero: What rank 0 waits for, if that is something else.
    """
    if trainer.is_global_zero:
        return waiting_for(on_rank_zero or what)
    if trainer.local_rank == 0:
        return waiting_for(what)
    return nullcontext()


def count_restarts() -> int:
    """Return how often torchrun may start the processes again; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def require_restartable(resume: bool) -> None:
    """Check that the run continues if torchrun starts its processes again.

    torchrun's agent ends all processes when one has failed, and starts them again with the same words, so
    that `--resume true` finds the newest checkpoint, or starts over if there is none. What a restarted run
    does follows only from its run folder. Each node's agent counts its own restarts: good for a message.

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
