"""Plant a fault known from other trainers into a small run, and show which line of code notices it.

    python research/faults.py                  the names of the faults
    python research/faults.py stale_weights    the sound run, then the same run with this fault

Only vLLM itself is replaced. `Worker` serves vLLM's HTTP routes, and samples with a copy of the model of
184,000 parameters that comes with the package, so a run takes seconds on a CPU:

    RLTModule ── VLLMEngine ── HTTP ──▶ Worker: HFEngine with a copy of the weights
                     └────── IPCPush ──▶ loads each push into its copy

research/faults.md tells where each fault comes from.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from rlt_lightning import (
    OptimizerConfig,
    RLTModule,
    RolloutCallback,
    Sampling,
    Trainer,
)
from rlt_lightning.checkpoints.folder import STATE, find_checkpoint
from rlt_lightning.datamodules import TeacherRLData
from rlt_lightning.engines import EngineError, HFEngine, IPCPush, SampleRequest, VLLMEngine
from rlt_lightning.models.embedded import resolve
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.models.packed import sequence_log_probs
from rlt_lightning.rewards import RLTReward
from rlt_lightning.run.digests import SUFFIX, write_digests
from rlt_lightning.types import InputError
from rlt_lightning.worker import VLLM_MINORS
from rlt_lightning.worker.ipc import TensorReader, open_buffer

JSON = dict[str, Any]


# The run


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        steps: Optimizer steps that it has taken.
        lines: Its warnings and alarms, and the error that ended it.
    """

    steps: int
    lines: list[str]


@dataclass(frozen=True)
class Run:
    """A small run of stage 2, as far as faults change it.

    Attributes:
        folder: The run folder.
        url: The worker that samples; None: the trainer's own process does.
        teacher: The teacher.
        max_steps: Optimizer steps.
        resume: Whether to continue the run in the folder.
        reward: What explanations earn.
        options: Of the trainer, further ones.
        push_timeout_s: How long a push may take.
    """

    folder: Path
    url: str | None = None
    teacher: str = "miniature"
    max_steps: int = 2
    resume: bool = False
    reward: RLTReward = RLTReward()
    options: tuple[tuple[str, Any], ...] = ()
    push_timeout_s: float = 30.0

    def watch(self) -> Outcome:
        """Train, and collect what the run says of itself."""
        module = RLTModule(
            self.teacher,
            "miniature",
            reward=self.reward,
            group_size=2,
            optimizer=OptimizerConfig(lr=1e-3),
            micro_batch_tokens=1024,
        )
        data = TeacherRLData(
            "chains",
            num_embedded_rows=16,
            prompts_per_step=2,
            tags="r1",
            teacher_system_prompt="",
            student_system_prompt="",
        )
        engine = None
        if self.url is not None:
            push = IPCPush(timeout_s=self.push_timeout_s)
            engine = VLLMEngine([self.url], push=push, recovery_timeout_s=30.0)
        printed, trainer, error = io.StringIO(), None, None
        logged = logging.StreamHandler(printed)
        logging.getLogger("rlt_lightning").addHandler(logged)
        with redirect_stdout(printed), redirect_stderr(printed), warnings.catch_warnings(record=True) as told:
            try:
                trainer = Trainer(
                    self.folder,
                    resume=self.resume,
                    max_steps=self.max_steps,
                    accelerator="cpu",
                    enable_progress_bar=False,
                    callbacks=[RolloutCallback(engine, Sampling(temperature=0.7, max_completion_length=8))],
                    **dict(self.options),
                )
                trainer.fit(module, data)
            except (EngineError, InputError, MisconfigurationException) as found:
                error = found
        logging.getLogger("rlt_lightning").removeHandler(logged)
        lines = [line for line in printed.getvalue().splitlines() if line.startswith(("rlt: alarm", "Lost"))]
        lines += [str(one.message) for one in told]
        lines += [] if error is None else [f"{type(error).__name__}: {error}"]
        return Outcome(0 if trainer is None else trainer.global_step, lines)


# The worker


class Worker:
    """A vLLM worker in miniature. Its methods are what a fault overrides."""

    def __init__(self) -> None:
        self.model = load_model(resolve("miniature"))
        self.engine = HFEngine()
        self.engine.start(self.model, load_tokenizer("miniature"), Path())
        self.reader = TensorReader(torch.device("cpu"))
        self.version = "default"
        self.lock = Lock()
        self.closed = Event()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take the weights of a push."""
        self.model.load_state_dict(tensors, strict=False)

    def update(self, info: JSON) -> None:
        """Read the weights of a push."""
        content = open_buffer(info["buffer"], torch.device("cpu"))
        self.load(dict(self.reader.read(content, info["parts"])))

    def sample(self, body: JSON) -> JSON:
        """Sample one completion."""
        sampling = Sampling(body["temperature"], max_completion_length=body["max_tokens"])
        stop = "".join(body["stop"])
        request = SampleRequest(body["prompt"], body["seed"])
        [(_, completion)] = self.engine.sample([request], sampling, stop)
        ended = completion.finish_reason != "length"
        return {
            "index": 0,
            "token_ids": completion.token_ids,
            "logprobs": {"token_logprobs": completion.log_probs},
            "finish_reason": "stop" if ended else "length",
            "stop_reason": stop if completion.finish_reason == "stop" else None,
        }

    def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probs of all tokens of a text but the first, nats."""
        with torch.no_grad():
            return sequence_log_probs(self.model, token_ids).tolist()

    def report_log_prob(self) -> float:
        """Return the log-prob of a token that is the only one allowed: 0 as it is sampled, raw below 0."""
        return 0.0

    def complete(self, body: JSON) -> JSON:
        """Answer /v1/completions: a check of the log-probs, the score of a text, or a completion."""
        if "allowed_token_ids" in body:
            return {"choices": [{"logprobs": {"token_logprobs": [self.report_log_prob()]}}]}
        with self.lock:
            if "prompt_logprobs" not in body:
                return {"choices": [self.sample(body)]}
            pairs = zip(body["prompt"][1:], self.score(body["prompt"]), strict=True)
            return {"choices": [{"prompt_logprobs": [None, *({str(t): {"logprob": s}} for t, s in pairs)]}]}

    def answer(self, path: str, body: JSON) -> JSON:
        """Answer a route of vLLM."""
        match path:
            case "/v1/completions":
                return self.complete(body)
            case "/update_weights":
                self.update(body["update_info"])
            case "/finish_weight_update":
                self.version = body["weight_version"]
            case "/weight_info":
                return {"weight_version": self.version}
            case "/v1/models":
                return {"data": [{"id": "miniature"}]}
            case "/version":
                return {"version": VLLM_MINORS[0]}
            case "/get_world_size":
                return {"world_size": 1}
            case "/collective_rpc":
                return {"results": [{"dtype": "float32", "can_sleep": False}]}
        return {}

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve in threads of this process; yield the address."""
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                content = json.dumps(worker.answer(self.path.partition("?")[0], body)).encode()
                with suppress(ConnectionError):  # the run may have given up
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            do_POST = do_GET

            @override
            def log_message(self, *arguments: Any) -> None:
                """Print nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            self.closed.set()
            server.shutdown()
            server.server_close()


# The faults


class StaleWorker(Worker):
    """Says that it has taken a push, and keeps its first weights."""

    @override
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take nothing."""


class PartialWorker(Worker):
    """Takes all of a push but one layer's attention."""

    @override
    def load(self, tensors: dict[str, Tensor]) -> None:
        super().load({name: tensor for name, tensor in tensors.items() if "layers.0.self_attn" not in name})


class RawWorker(Worker):
    """Reports log-probs before the temperature, as vLLM does unless it is told otherwise."""

    @override
    def report_log_prob(self) -> float:
        return -9.0


class CoarseWorker(Worker):
    """Scores a text as the trainer does, and samples with weights in 4 bits."""

    @override
    def sample(self, body: JSON) -> JSON:
        exact = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for tensor in self.model.state_dict().values():
            step = tensor.abs().max() / 7
            tensor.copy_((tensor / step).round() * step)
        try:
            return super().sample(body)
        finally:
            self.model.load_state_dict(exact)


class HangingWorker(Worker):
    """Takes the first push; the second one never ends."""

    @override
    def update(self, info: JSON) -> None:
        if self.version != "default":
            self.closed.wait()
        super().update(info)


def sample_with(kind: type[Worker], folder: Path, push_timeout_s: float = 30.0) -> Outcome:
    """Train with completions of a worker of this kind."""
    with redirect_stderr(io.StringIO()):  # it says that it loads a model
        worker = kind()
    with worker.serve() as url:
        return Run(folder, url, push_timeout_s=push_timeout_s).watch()


def stale_weights(folder: Path, planted: bool) -> Outcome:
    """The worker says that it has taken every push, but samples with its first weights."""
    return sample_with(StaleWorker if planted else Worker, folder)


def missing_weights(folder: Path, planted: bool) -> Outcome:
    """The worker takes all of a push but one layer's attention."""
    return sample_with(PartialWorker if planted else Worker, folder)


def raw_log_probs(folder: Path, planted: bool) -> Outcome:
    """The worker reports log-probs before the temperature, the trainer computes them after it."""
    return sample_with(RawWorker if planted else Worker, folder)


def coarse_engine(folder: Path, planted: bool) -> Outcome:
    """The worker passes every check of its weights, but samples with them rounded to 4 bits."""
    return sample_with(CoarseWorker if planted else Worker, folder)


def hanging_push(folder: Path, planted: bool) -> Outcome:
    """The worker takes the first push; the second one never ends."""
    return sample_with(HangingWorker if planted else Worker, folder, push_timeout_s=2.0)


def wrong_template(folder: Path, planted: bool) -> Outcome:
    """The teacher's chat template leaves the user's message out."""
    teacher = folder / "teacher"
    shutil.copytree(resolve("miniature"), teacher)
    template = teacher / "chat_template.jinja"
    if planted:
        template.write_text(template.read_text().replace("{{ m['content'] }}", ""))
    return Run(folder / "run", teacher=str(teacher)).watch()


def resume_from(folder: Path, batches: int) -> Outcome:
    """Train two steps, move the checkpoint's position in the data, and continue for two steps."""
    Run(folder, max_steps=2).watch()
    checkpoint = find_checkpoint(folder / "checkpoints")
    path = checkpoint / STATE
    state = torch.load(path, weights_only=True)
    for position in find_positions(state):
        position["next_batch"] += batches
        position["position"] += 2 * batches
    torch.save(state, path)
    # With digests of its own: it stands for a checkpoint that was wrong when it was written.
    files = [file for file in checkpoint.rglob("*") if file.is_file() and file.suffix != SUFFIX]
    write_digests(checkpoint, files)
    return Run(folder, max_steps=4, resume=True).watch()


def find_positions(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the positions in the data that a checkpoint's state holds."""
    if isinstance(state, dict):
        if "next_batch" in state:
            yield state
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for part in state:
            yield from find_positions(part)


def replayed_data(folder: Path, planted: bool) -> Outcome:
    """The checkpoint's position in the data is one batch behind its step: a batch would come twice."""
    return resume_from(folder, -1 if planted else 0)


def skipped_data(folder: Path, planted: bool) -> Outcome:
    """The checkpoint's position in the data is one batch ahead: a batch would be left out."""
    return resume_from(folder, 1 if planted else 0)


def accumulated_batches(folder: Path, planted: bool) -> Outcome:
    """A second batch size, Lightning's accumulate_grad_batches, would change what a step is."""
    return Run(folder, options=(("accumulate_grad_batches", 4),) if planted else ()).watch()


FAULTS: dict[str, Callable[[Path, bool], Outcome]] = {
    fault.__name__: fault
    for fault in (
        stale_weights,
        missing_weights,
        raw_log_probs,
        coarse_engine,
        hanging_push,
        wrong_template,
        replayed_data,
        skipped_data,
        accumulated_batches,
    )
}


def plant(name: str) -> Outcome:
    """Run without a fault and with it; return the run with it and the lines that only it printed.

    Raises:
        AssertionError: If nothing notices the fault.
    """
    outcomes = []
    for planted in (False, True):
        with TemporaryDirectory() as folder:
            outcomes.append(FAULTS[name](Path(folder), planted))
    sound, faulty = outcomes
    lines = [line for line in faulty.lines if line not in sound.lines]
    assert lines, f"nothing has noticed {name}"
    return Outcome(faulty.steps, lines)


def main() -> None:
    """Plant the fault that the command line names."""
    parser = argparse.ArgumentParser(description="Plant a fault in a small run; show what notices it.")
    parser.add_argument("fault", nargs="?", choices=FAULTS, help="which one; without it all are listed")
    name = parser.parse_args().fault
    if name is None:
        for name, fault in FAULTS.items():
            print(f"{name:20} {fault.__doc__}")
        return
    print(FAULTS[name].__doc__)
    begin = time.monotonic()
    outcome = plant(name)
    seconds = time.monotonic() - begin
    print(f"Noticed after step {outcome.steps} ({seconds:.0f} s with the sound run):")
    print(*dict.fromkeys((outcome.lines[0], outcome.lines[-1])), sep="\n")


if __name__ == "__main__":
    main()
