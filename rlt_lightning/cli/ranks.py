"""When a process of a run fails, all of them end within seconds, and rank 0 prints why as its last line.

    start_watch      a rank that another process or a launcher has started    -> its thread connects to rank 0
    watch_trainer    rank 0, before it starts others                          -> its thread listens
    fail_run         any rank, on an exception                                -> all ranks end
    end_run          every rank, after a run that went well                   -> its thread ends

A thread in every process notices when another process fails, and ends its own. Each thread of ranks 1, 2, …
holds a connection to rank 0's thread. The operating system closes it however a process ends, so that a killed
rank is noticed even where collectives would wait for it for ever.

    main thread, rank 1        thread, rank 1           thread, rank 0                   main thread, rank 0
    exception ──fail_run──▶    ──── failure ─────────▶  collect failures
                               ◀─── where? ───────────  to all: where is your main thread?
                               ──── place ───────────▶  pick the failure that came first
                               ◀─── failure ──────────  to all: end with this failure    waits, or hangs in
    cleans up, GRACE_S         ends the process         waits until all have ended,      a collective
                                                        prints it, ends the process

    rank 1 is killed: its connection closes, which is a silent failure of rank 1
    rank 0 is killed: all connections close, and one rank of each node prints that rank 0 ended
    a launcher sends SIGTERM, mostly because a rank has failed: the threads have SETTLE_S to learn which one
    the run goes well: each rank sends done, rank 0 answers done to all, and the threads end

This does not use `torch.distributed.elastic.multiprocessing`: it watches only processes that it has started
itself on one node, and cannot ask a rank that lives where it is.

torchrun may start a failed run again. Its agent ends all processes when one has failed, and repeats them:

    torchrun --max-restarts 3      rank 1 is killed             all ranks start again, with the same words:
    agent ── starts ranks 0, 1 ──▶ rank 0 prints it, ends ────▶ --resume true finds the newest checkpoint,
                                                                or starts over if there is none

What a restarted run does follows only from its run folder. Each node's agent counts its own restarts, so the
number is good for a message and not for a decision.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import sysconfig
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import Popen
from traceback import extract_stack, format_exception, print_exc
from typing import Any, Literal, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies.launchers import subprocess_script
from typing_extensions import override

from rlt_lightning.callbacks.interrupt import Interrupted
from rlt_lightning.console import announce
from rlt_lightning.engines import EngineError
from rlt_lightning.gloo import LOOPBACK
from rlt_lightning.numerics.rewards import NonFiniteError
from rlt_lightning.run.folder import remove_empty_folders
from rlt_lightning.types import InputError

# Errors whose message says what to do in one line; a traceback would add nothing.
MISTAKES = (InputError, NonFiniteError, EngineError, MisconfigurationException)

# Kinds of failures: one that stands further on mostly follows from one before it.
KINDS = ("own", "silent", "told", "connection")
# host:port:token of rank 0, in the environment that children inherit, and in the store of the process group.
ADDRESS = "RLT_RANK_ZERO"
POLL_S = 0.1
# How long rank 0 waits, after a broken connection, for the failure that broke it.
SETTLE_S = 1.5
# How long the main thread may take to return and clean up once the run has failed.
GRACE_S = 4.0
# How long rank 0 waits at the end of a run until the other ranks are done as well.
OTHERS_DONE_S = 60.0
# How long a rank without a connection waits: a launcher that ends it because of another rank needs less.
LAUNCHER_S = 3.0


@dataclass(frozen=True)
class Failure:
    """Why a rank failed.

    Args:
        rank: The rank that failed.
        message: What happened, in one line.
        status: The exit status of all processes.
        details: A traceback, or nothing.
        kind: "own": the rank said what went wrong; "silent": it ended without a word; "told": its launcher
            ended it; "connection": it waited for another rank that had ended or was late.
    """

    rank: int
    message: str
    status: int
    details: str = ""
    kind: Literal["own", "silent", "told", "connection"] = "own"

    def print(self) -> None:
        """Print the failure to the standard error stream."""
        print(f"{self.details}{self.line}", file=sys.stderr, flush=True)

    @property
    def line(self) -> str:
        """Return the last line that the user sees."""
        return f"rlt: error: rank {self.rank}: {self.message}"


def describe_failure(error: BaseException, rank: int) -> Failure:
    """Return an exception as the failure of a rank."""
    text = " ".join(str(error).split())
    if isinstance(error, MISTAKES):
        return Failure(rank, text, 2)
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return Failure(rank, "It was told to end.", 1)
    broken = isinstance(error, RuntimeError) and "gloo" in text
    broken = broken or isinstance(error, torch.distributed.DistError)
    name = type(error).__name__
    details = "".join(format_exception(error))
    return Failure(rank, f"{name}: {text}" if text else name, 1, details, "connection" if broken else "own")


def describe_silence(rank: int, how: str = "It was killed, or ran out of memory.") -> Failure:
    """Return the failure of a rank that ended without saying why."""
    message = (
        f"Every rank must run to the end, but this one ended without a message. {how} What it printed, if "
        "anything, stands above or in its log. Resume with --resume true."
    )
    return Failure(rank, message, 1, kind="silent")


def end_process(failure: Failure) -> NoReturn:
    """End at once, since cleaning up may wait for ranks that have ended; tell torchrun in its error file."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time())), "py_callstack": failure.line}
        Path(path).write_text(json.dumps({"message": {"message": failure.line, "extraInfo": extra}}))
    remove_empty_folders()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.status)


class Connection:
    """JSON messages over a socket.

    Attributes:
        rank: The rank of the other end; -1 until it has said so.
        place: Where the other end's main thread is, and whether it waits for other ranks there.
        done: Whether the other end has ended well.
    """

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.socket.settimeout(GRACE_S)
        # With these, a node that lost power is noticed too.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.received = b""
        self.rank = -1
        self.place: tuple[str, bool] | None = None
        self.done = False

    def send(self, **message: Any) -> None:
        """Send a message. If the other end has ended, `receive` will notice."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[bytes] | None:
        """Return the messages that have come, or None if the other end has ended."""
        try:
            chunk = self.socket.recv(65536)
        except OSError:
            return None
        *messages, self.received = (self.received + chunk).split(b"\n")
        return messages if chunk else None


class Watch(threading.Thread, ABC):
    """A rank's thread. The main thread reports failures to it; the thread then ends the process.

    Args:
        rank: The rank of this process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(daemon=True, name="rank-failures")
        self.rank = rank
        self.world_size = 0  # until the trainer exists
        self.launcher: Any = None
        self.reports: list[Failure] = []  # from the main thread
        self.main_is_done = threading.Event()  # the main thread waits for this one to end the process
        self.ended_well = threading.Event()

    @override
    def run(self) -> None:
        try:
            self.watch()
        except Exception:
            print_exc()
            os._exit(1)  # without this thread no failure would be noticed

    @abstractmethod
    def watch(self) -> None:
        """Listen until the run ends."""

    def fail_run(self, failure: Failure) -> NoReturn:
        """End the run on all ranks; the main thread calls this."""
        self.reports.append(failure)
        self.main_is_done.set()
        self.join()
        raise AssertionError("The thread ends the process.")

    def end_run(self) -> None:
        """End this rank's part of a run that went well; the main thread calls this."""
        self.ended_well.set()
        self.join()

    def outlast_launcher(self) -> None:
        """Let SIGTERM be a report. A launcher sends it once a rank has failed, before rank 0 could say which.

        While a trainer runs, Lightning's own handler lets the iteration end instead.
        """

        def report(*_: Any) -> None:
            if signal.getsignal(signal.SIGTERM) is report:
                self.reports.append(Failure(self.rank, "It was told to end.", 1, kind="told"))

        signal.signal(signal.SIGTERM, report)

    def list_children(self) -> list[Popen[bytes]]:
        """Return the ranks of this node that this process has started."""
        return getattr(self.launcher, "procs", [])

    def collect_failures(self) -> Iterator[Failure]:
        """Yield what the main thread has reported, and children that failed before they could connect."""
        while self.reports:
            yield self.reports.pop(0)
        for number, child in enumerate(self.list_children(), 1):
            if child.poll():
                yield describe_silence(self.rank + number, f"It ended with status {child.returncode}.")


class RankZero(Watch):
    """Rank 0's thread: it collects all failures, picks the first, and tells it to all ranks.

    Args:
        one_node: Whether all processes are on this machine; no other machine can connect then.
    """

    def __init__(self, one_node: bool) -> None:
        super().__init__(0)
        self.token = secrets.token_hex(16)
        self.one_node = one_node
        if one_node or not socket.has_dualstack_ipv6():
            self.listener = socket.create_server((LOOPBACK if one_node else "", 0))
        else:
            self.listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self.port = self.listener.getsockname()[1]
        self.announced = False
        self.connections: list[Connection] = []
        self.failures: list[Failure] = []
        self.failed_at = 0.0
        self.num_done = 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        os.environ[ADDRESS] = f"{LOOPBACK}:{self.port}:{self.token}"

    @override
    def watch(self) -> None:
        ended_at = float("inf")
        while True:
            self.announce()
            self.listen()
            self.failures += self.collect_failures()
            if self.failures:
                self.end_if_clear()
            elif self.ended_well.is_set():
                ended_at = min(ended_at, time.monotonic())
                if self.num_done == self.world_size - 1 or time.monotonic() > ended_at + OTHERS_DONE_S:
                    for connection in self.connections:
                        connection.send(done=True)
                    return

    def announce(self) -> None:
        """Put the address into the store, for ranks that this process has not started."""
        if not self.announced and torch.distributed.is_initialized():
            host = LOOPBACK if self.one_node else os.environ["MASTER_ADDR"]
            get_default_store().set(ADDRESS, f"{host}:{self.port}:{self.token}")
            self.announced = True

    def listen(self) -> None:
        """Handle what has come within POLL_S."""
        for key, _ in self.selector.select(POLL_S):
            if key.fileobj is self.listener:
                connection = Connection(self.listener.accept()[0])
                self.selector.register(connection.socket, selectors.EVENT_READ, connection)
                continue
            connection = key.data
            messages = connection.receive()
            if messages and connection.rank < 0:
                self.admit(connection, messages.pop(0))
            if messages is None or connection.rank < 0:
                self.selector.unregister(connection.socket)
                connection.socket.close()
                if connection in self.connections:
                    self.connections.remove(connection)
                    self.failures += [] if connection.done else [describe_silence(connection.rank)]
                continue
            for message in messages:
                self.handle(connection, json.loads(message))

    def admit(self, connection: Connection, first_message: bytes) -> None:
        """Accept a rank by its first message, the token and its number; ignore any other process."""
        token, _, rank = first_message.decode(errors="replace").partition(" ")
        if secrets.compare_digest(token.encode(), self.token.encode()):
            connection.rank = int(rank)
            self.connections.append(connection)

    def handle(self, connection: Connection, message: dict[str, Any]) -> None:
        """Note what a message of a rank says."""
        if "failure" in message:
            self.failures.append(Failure(**message["failure"]))
        elif "place" in message:
            connection.place = tuple(message["place"])
        elif "done" in message:
            connection.done = True
            self.num_done += 1

    def end_if_clear(self) -> None:
        """End the run once it is clear which failure came first."""
        if not self.failed_at:
            self.failed_at = time.monotonic()
            for connection in self.connections:
                connection.send(where=True)
        first = min(self.failures, key=lambda failure: KINDS.index(failure.kind))
        if first.kind == "own" or time.monotonic() > self.failed_at + SETTLE_S:
            self.end(first if first.kind == "own" else self.add_places(first))

    def add_places(self, failure: Failure) -> Failure:
        """Add to a failed collective where the main threads of the other ranks are, if they answer."""
        places: dict[int, tuple[str, bool] | None] = dict.fromkeys(range(self.world_size))
        places |= {0: find_main_thread()} | {other.rank: other.place for other in self.connections}
        del places[failure.rank]
        late = [f"{rank}, in {place[0]}" for rank, place in places.items() if place and not place[1]]
        late += [f"{rank}, which does not answer" for rank, place in places.items() if not place]
        if failure.kind != "connection" or not late:
            return failure
        message = (
            "All ranks must make this call, but this one waited in vain for rank "
            f"{'; rank '.join(sorted(late))}. If that rightly takes so long, raise the strategy's timeout, "
            f"or rollouts.deadline_s. {failure.message}"
        )
        return replace(failure, message=message)

    def end(self, failure: Failure) -> NoReturn:
        """Send all ranks the failure, wait until they have ended, print it, and end this process."""
        launched = self.list_children()
        if not launched:
            # An outside launcher ends this process as soon as another has ended.
            failure.print()
        for connection in self.connections:
            connection.send(failure=asdict(failure))
        deadline = time.monotonic() + GRACE_S + 1
        while time.monotonic() < deadline and (self.connections or not self.main_is_done.is_set()):
            self.listen()
        for child in launched:
            child.kill()
            child.wait()
        if launched:
            failure.print()
        end_process(failure)


class OtherRank(Watch):
    """The thread of a rank other than 0."""

    @override
    def watch(self) -> None:
        address = self.find_rank_zero()
        if address is None:
            return
        host, port, token = address.rsplit(":", 2)
        connection = Connection(socket.create_connection((host, int(port)), timeout=GRACE_S))
        connection.socket.sendall(f"{token} {self.rank}\n".encode())
        with selectors.DefaultSelector() as selector:
            selector.register(connection.socket, selectors.EVENT_READ)
            while not self.ended_well.is_set():
                for failure in self.collect_failures():
                    connection.send(failure=asdict(failure))
                if selector.select(POLL_S):
                    self.obey(connection)
        connection.send(done=True)

    def find_rank_zero(self) -> str | None:
        """Return the address of rank 0, from the environment or from the store; None if the run has ended."""
        if ADDRESS in os.environ:
            return os.environ[ADDRESS]
        while not self.ended_well.is_set():
            for failure in self.collect_failures():
                time.sleep(LAUNCHER_S)
                failure.print()
                end_process(failure)
            if torch.distributed.is_initialized() and get_default_store().check([ADDRESS]):
                return get_default_store().get(ADDRESS).decode()
            time.sleep(POLL_S)
        return None

    def obey(self, connection: Connection) -> None:
        """Do what rank 0 has sent."""
        messages = connection.receive()
        if messages is None:
            # One rank of each node prints it.
            if self.rank == 1 or os.environ.get("LOCAL_RANK") == "0":
                describe_silence(0).print()
            end_process(describe_silence(0))
        for message in map(json.loads, messages):
            if "failure" in message:
                self.main_is_done.wait(GRACE_S)
                end_process(Failure(**message["failure"]))
            if "where" in message:
                connection.send(place=find_main_thread())
            if "done" in message:
                self.ended_well.set()


def find_main_thread() -> tuple[str, bool]:
    """Return our or the user's function that the main thread is in, and whether it waits for ranks there."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    frames = extract_stack(frame)
    libraries = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<frozen")
    own = [f for f in frames if not f.filename.startswith(libraries)] or frames
    meets = any(f.filename.startswith(str(Path(torch.distributed.__file__).parent)) for f in frames)
    return f"{own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno})", meets


def get_default_store() -> Any:
    """Return the store of the process group."""
    return torch.distributed.distributed_c10d._get_default_store()


class FailureReport(Callback):
    """Report an exception to the other ranks before anything is cleaned up, which may wait for them."""

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # All ranks get these two together: of an EngineError they may yet write a checkpoint together.
        if watch is not None and not isinstance(exception, EngineError | Interrupted):
            watch.reports.append(describe_failure(exception, watch.rank))


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
        watch.fail_run(describe_failure(error, watch.rank))


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
