"""Threads that see when another process of the run fails, and end this one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import sysconfig
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import Popen
from traceback import extract_stack, print_exc
from typing import Any, NoReturn

import torch
from typing_extensions import override

from rlt_lightning.cli.failure import Failure, end_process, gone
from rlt_lightning.gloo import LOOPBACK

ADDRESS = "RLT_RANK_ZERO"  # host:port:token, in the environment that children inherit, and in the store
POLL_S = 0.1
SETTLE_S = 1.5  # how long a broken connection waits for news of the failure that broke it
GRACE_S = 4.0  # for the main thread to come back and clean up, once the run has failed
FAREWELL_S = 60.0  # how long rank 0 waits at the end of a run until the others are done as well
ASIDE_S = 3.0  # where there is no connection: a launcher that ends this rank because of another needs less


class Line:
    """JSON messages over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(GRACE_S)
        self.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
        )  # a node that lost power is missed too
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.received = b""
        self.rank = -1  # of the other end, once it has said so
        self.place: tuple[str, bool] | None = (
            None  # where its main thread is, and whether that is a collective
        )
        self.done = False

    def send(self, **message: Any) -> None:
        """Send a message; that the other end is gone is seen in what it sends."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[bytes] | None:
        """What has come; None: the other end is gone."""
        try:
            chunk = self.socket.recv(65536)
        except OSError:
            return None
        *messages, self.received = (self.received + chunk).split(b"\n")
        return messages if chunk else None


class Watch(threading.Thread, ABC):
    """A rank's thread. The main thread reports to it, and leaves the end of a failed process to it.

    Args:
        rank: Of this process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(daemon=True, name="rank-failures")
        self.rank = rank
        self.world_size = 0  # until the trainer is there
        self.launcher: Any = None
        self.reports: list[Failure] = []  # of the main thread
        self.parked = threading.Event()  # the main thread has nothing more to do
        self.leaving = threading.Event()  # the run has ended well

    @override
    def run(self) -> None:
        try:
            self.watch()
        except Exception:
            print_exc()
            os._exit(1)  # without this thread nobody would notice anything

    @abstractmethod
    def watch(self) -> None:
        """Listen until the run ends."""

    def fail(self, failure: Failure) -> NoReturn:
        """End the run on all ranks."""
        self.reports.append(failure)
        self.parked.set()
        self.join()
        raise AssertionError("The thread ends the process.")

    def leave(self) -> None:
        """End this rank's part of a run that went well."""
        self.leaving.set()
        self.join()

    def children(self) -> list[Popen[bytes]]:
        """Processes of this node that this one has started."""
        return getattr(self.launcher, "procs", [])

    def news(self) -> Iterator[Failure]:
        """What the main thread has reported, and children that ended with nobody connected to miss them."""
        while self.reports:
            yield self.reports.pop(0)
        for number, child in enumerate(self.children(), 1):
            if child.poll():
                yield gone(self.rank + number, f"It ended with status {child.returncode}.")


class RankZero(Watch):
    """Rank 0's thread: it hears of every failure, judges, and tells.

    Args:
        one_node: Whether all processes are on this machine; nobody else can connect then.
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
        self.lines: list[Line] = []
        self.failures: list[Failure] = []
        self.failed_at = 0.0
        self.num_done = 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        os.environ[ADDRESS] = f"{LOOPBACK}:{self.port}:{self.token}"

    @override
    def watch(self) -> None:
        left_at = float("inf")
        while True:
            self.announce()
            self.listen()
            self.failures += self.news()
            if self.failures:
                self.judge()
            elif self.leaving.is_set():
                left_at = min(left_at, time.monotonic())
                if self.num_done == self.world_size - 1 or time.monotonic() > left_at + FAREWELL_S:
                    for line in self.lines:
                        line.send(done=True)
                    return

    def announce(self) -> None:
        """Let ranks that this process has not started know where to connect."""
        if not self.announced and torch.distributed.is_initialized():
            host = LOOPBACK if self.one_node else os.environ["MASTER_ADDR"]
            default_store().set(ADDRESS, f"{host}:{self.port}:{self.token}")
            self.announced = True

    def listen(self) -> None:
        """Take in what has come within a short while."""
        for key, _ in self.selector.select(POLL_S):
            if key.fileobj is self.listener:
                line = Line(self.listener.accept()[0])
                self.selector.register(line.socket, selectors.EVENT_READ, line)
                continue
            line = key.data
            messages = line.receive()
            if messages and line.rank < 0:
                self.welcome(line, messages.pop(0))
            if messages is None or line.rank < 0:
                self.selector.unregister(line.socket)
                line.socket.close()
                if line in self.lines:
                    self.lines.remove(line)
                    self.failures += [] if line.done else [gone(line.rank)]
                continue
            for message in messages:
                self.take(line, json.loads(message))

    def welcome(self, line: Line, first_message: bytes) -> None:
        """Know a rank by what it says first; strangers are not heard."""
        token, _, rank = first_message.decode(errors="replace").partition(" ")
        if secrets.compare_digest(token.encode(), self.token.encode()):
            line.rank = int(rank)
            self.lines.append(line)

    def take(self, line: Line, message: dict[str, Any]) -> None:
        """Take one message in."""
        if "failure" in message:
            self.failures.append(Failure(**message["failure"]))
        elif "place" in message:
            line.place = tuple(message["place"])
        elif "done" in message:
            line.done = True
            self.num_done += 1

    def judge(self) -> None:
        """End the run with the failure that came first, once it is known."""
        if not self.failed_at:
            self.failed_at = time.monotonic()
            for line in self.lines:
                line.send(where=True)
        first = min(self.failures, key=lambda failure: ("own", "silent", "connection").index(failure.kind))
        if first.kind == "own" or time.monotonic() > self.failed_at + SETTLE_S:
            self.end(first if first.kind == "own" else self.explained(first))

    def explained(self, failure: Failure) -> Failure:
        """Add where the other ranks are, as far as they answer."""
        places: dict[int, tuple[str, bool] | None] = dict.fromkeys(range(self.world_size))
        places |= {0: main_thread_place()} | {line.rank: line.place for line in self.lines}
        del places[failure.rank]
        late = [f"{rank}, in {place[0]}" for rank, place in places.items() if place and not place[1]]
        late += [f"{rank}, which does not answer" for rank, place in places.items() if not place]
        if failure.kind == "silent" or not late:
            return failure
        message = (
            f"All ranks must meet, but this one waited in vain for rank {'; rank '.join(sorted(late))}. If "
            "that rightly takes so long, raise the strategy's timeout, or rollouts.deadline_s. "
            f"{failure.message}"
        )
        return replace(failure, message=message)

    def end(self, failure: Failure) -> NoReturn:
        """Tell all ranks, wait until they have ended, tell the user, and end."""
        launched = self.children()
        if not launched:  # a launcher of another kind ends this process as soon as another has ended
            failure.tell()
        for line in self.lines:
            line.send(failure=asdict(failure))
        deadline = time.monotonic() + GRACE_S + 1
        while time.monotonic() < deadline and (self.lines or not self.parked.is_set()):
            self.listen()
        for child in launched:
            child.kill()
            child.wait()
        if launched:
            failure.tell()
        end_process(failure)


class OtherRank(Watch):
    """The thread of a rank other than 0."""

    @override
    def watch(self) -> None:
        address = self.find_rank_zero()
        if address is None:
            return
        host, port, token = address.rsplit(":", 2)
        line = Line(socket.create_connection((host, int(port)), timeout=GRACE_S))
        line.socket.sendall(f"{token} {self.rank}\n".encode())
        with selectors.DefaultSelector() as selector:
            selector.register(line.socket, selectors.EVENT_READ)
            while not self.leaving.is_set():
                for failure in self.news():
                    line.send(failure=asdict(failure))
                if selector.select(POLL_S):
                    self.heed(line)
        line.send(done=True)

    def find_rank_zero(self) -> str | None:
        """Where to connect: from the environment, or from the store once there is one."""
        if ADDRESS in os.environ:
            return os.environ[ADDRESS]
        while not self.leaving.is_set():
            for failure in self.news():
                time.sleep(ASIDE_S)
                failure.tell()
                end_process(failure)
            if torch.distributed.is_initialized() and default_store().check([ADDRESS]):
                return default_store().get(ADDRESS).decode()
            time.sleep(POLL_S)
        return None

    def heed(self, line: Line) -> None:
        """Do what rank 0 says."""
        messages = line.receive()
        if messages is None:
            if self.rank == 1 or os.environ.get("LOCAL_RANK") == "0":  # one of each node
                gone(0).tell()
            end_process(gone(0))
        for message in map(json.loads, messages):
            if "failure" in message:
                self.parked.wait(GRACE_S)
                end_process(Failure(**message["failure"]))
            if "where" in message:
                line.send(place=main_thread_place())
            if "done" in message:
                self.leaving.set()


def main_thread_place() -> tuple[str, bool]:
    """Our or the user's function that the main thread is in, and whether it waits for others there."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    frames = extract_stack(frame)
    libraries = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<frozen")
    own = [f for f in frames if not f.filename.startswith(libraries)] or frames
    meets = any(f.filename.startswith(str(Path(torch.distributed.__file__).parent)) for f in frames)
    return f"{own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno})", meets


def default_store() -> Any:
    """The store in which the process group has met."""
    return torch.distributed.distributed_c10d._get_default_store()
