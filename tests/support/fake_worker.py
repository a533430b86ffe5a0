"""A fake `vllm serve`: the routes that the engine calls, completions made up from their seed, and faults.

`FakeWorker` runs it in threads of a test; `fake_vllm` makes a program of it that a Launch can start.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Event, Lock, Thread
from typing import Any, ClassVar

JSON = dict[str, Any]
EOS = 2
END, TAG = "</end>", 9000  # an end tag, and the token of `FakeTokenizer` that is its text
DEV_ROUTES = {"/weight_info", "/collective_rpc", "/get_world_size", "/pause", "/resume"}
DEV_ROUTES |= {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights"}
DEV_ROUTES |= {"/finish_weight_update", "/reset_prefix_cache", "/sleep", "/wake_up"}

USES_MEMORY = {"/v1/completions", "/start_weight_update", "/update_weights", "/reset_prefix_cache"}


class Refused(Exception):
    """Answer with this status."""


class Dropped(Exception):
    """Close the connection without an answer."""


class FakeTokenizer:
    """Knows the words of the fake's completions: numbers, the end tag and an end token."""

    eos_token_id = EOS
    added_tokens_decoder: ClassVar = {EOS: "</s>"}

    def __len__(self) -> int:
        return 49152

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join(END if token == TAG else f" {token}" for token in token_ids)


def made_up(prompt: list[int], seed: int, max_tokens: int, endings: tuple[str, ...]) -> JSON:
    """A completion: tokens, log-probs and ending are functions of prompt and seed alone."""
    random = Random(f"{prompt} {seed}")
    ending = random.choice(endings)
    length = max_tokens if ending == "length" else random.randint(1, max_tokens)
    log_probs = [-8.0 - random.random() for _ in range(length)]
    token_ids = [random.randint(100, 8000) for _ in range(length - 1)]
    last = random.randint(100, 8000)
    token_ids.append({"eos": EOS, "stop": TAG, "length": last}[ending])
    return {"token_ids": token_ids, "logprobs": {"token_logprobs": log_probs}, "ending": ending}


class Server(ThreadingHTTPServer):
    """Takes more callers at once than the five of its base class, whose sixth waits for a second."""

    request_queue_size = 128


def listen(handle: Callable[[BaseHTTPRequestHandler], None], port: int) -> Server:
    """Serve GET and POST in threads, with a function that gets each call; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            handle(self)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = Server(("127.0.0.1", port), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


class FakeWorker:
    """One fake server. What it may do wrong:

    Args:
        faults: Of the next sampling calls, one each: 500, 400, nan, drop, hang (it answers nothing from then
            on), restart (it forgets its weights and answers), die, or "".
        always: The fault of all sampling calls.
        broken: Path -> what that route answers: a status, a body, or a function that writes the answer.
        api_key: Asked for on /v1 routes.
        dev_mode: Without it the routes of VLLM_SERVER_DEV_MODE are not there.
        raw_log_probs: As with --logprobs-mode raw_logprobs.
        dtype: Of its weights.
        frees: Whether it was started with --enable-sleep-mode.
        delay_s: Time that a completion takes.
        gate: Set when completions may come; until then sampling calls are in work. None: at once.
        endings: That its completions may have.
        score: Log-probs of all tokens of a text but the first.
        sampled: The same at the temperature of sampling, for its completions; None: made up.
        draw: Token ids and ending of a sampling call's completion; None: made up.
        on_init: Called with the body of /init_weight_transfer_engine.
        on_update: Called with the body of /update_weights; None: it must name a buffer, which is read.
        reads: Whether it reads the buffer, for which it needs torch, or only finds it.
    """

    def __init__(
        self,
        faults: tuple[str, ...] = (),
        always: str = "",
        broken: dict[str, Any] | None = None,
        api_key: str | None = None,
        dev_mode: bool = True,
        raw_log_probs: bool = False,
        dtype: str = "float32",
        frees: bool = True,
        delay_s: float = 0.0,
        gate: Event | None = None,
        endings: tuple[str, ...] = ("stop", "eos", "length"),
        score: Callable[[list[int]], list[float]] | None = None,
        sampled: Callable[[list[int], float], list[float]] | None = None,
        draw: Callable[[JSON], tuple[list[int], str]] | None = None,
        on_init: Callable[[JSON], None] | None = None,
        on_update: Callable[[JSON], None] | None = None,
        reads: bool = True,
        port: int = 0,
        model: str = "teacher",
    ) -> None:
        self.model = model
        self.faults, self.always, self.broken = deque(faults), always, broken or {}
        self.api_key, self.dev_mode, self.raw_log_probs, self.dtype = api_key, dev_mode, raw_log_probs, dtype
        self.frees, self.asleep = frees, False
        self.sleep_level = 0  # of the last time
        self.delay_s, self.gate = delay_s, gate
        self.endings, self.score, self.sampled, self.draw = endings, score, sampled, draw
        self.on_init, self.on_update, self.port = on_init, on_update, port
        self.version = "default"
        self.reads = reads
        self.tensors: JSON = {}  # of the last update, by name
        self.updating = False
        self.calls: list[str] = []  # method and path of every call
        self.bodies: list[JSON] = []  # of the sampling calls
        self.delivered: list[list[int]] = []  # prompts of the sampling calls that got all they asked for
        self.in_work = self.most_in_work = 0  # sampling calls at a time
        self.awake, self.serving = Event(), Event()  # hangs until awake; samples while serving
        self.awake.set()
        self.serving.set()
        self.server: Server | None = None
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listen, on the same port as before."""
        self.closed = Event()
        self.server = listen(self.handle, self.port)
        self.port = self.server.server_address[1]

    def close(self) -> None:
        """Refuse connections from now on, and drop those that wait."""
        if (server := self.server) is not None:
            self.closed.set()
            server.shutdown()
            server.server_close()
            self.server = None  # now the port is free for `open`

    def restart(self) -> None:
        """Be a new process: the weights are those of the start again, and no update is under way."""
        self.version, self.updating, self.asleep = "default", False, False
        self.serving.set()

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait(self, event: Event) -> None:
        """Keep the caller waiting until the event, or until this server is closed."""
        closed = self.closed
        while not event.wait(0.02):
            if closed.is_set():
                raise Dropped

    def handle(self, call: BaseHTTPRequestHandler) -> None:
        path, _, query = call.path.partition("?")
        if path == "/sleep":
            self.sleep_level = int(query.removeprefix("level="))
        self.calls.append(f"{call.command} {path}")
        length = int(call.headers.get("Content-Length") or 0)
        body = json.loads(call.rfile.read(length)) if length else {}
        try:
            self.wait(self.awake)
            if path.startswith("/v1") and self.api_key is not None:
                key = call.headers.get("Authorization")
                self.require(key == f"Bearer {self.api_key}", 401, "Unauthorized")
            self.require(self.dev_mode or path not in DEV_ROUTES, 404, "Not Found")
            answer = self.broken[path] if path in self.broken else self.answer(path, body)
            self.require(not isinstance(answer, int), answer, "broken")
            status = 200
        except Refused as refused:
            status, answer = refused.args
        except Dropped:
            call.close_connection = True
            return
        except Exception as error:
            status, answer = 500, {"error": repr(error)}
        if callable(answer):  # what it is asked for it writes itself
            with suppress(ConnectionError):
                answer(call)
            return
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with suppress(ConnectionError):  # the caller may have given up
            call.send_response(status)
            call.send_header("Content-Length", str(len(content)))
            call.end_headers()
            call.wfile.write(content)

    def require(self, condition: bool, status: Any, reason: str) -> None:
        if not condition:
            raise Refused(status, {"error": reason})

    def answer(self, path: str, body: JSON) -> JSON | bytes:
        self.require(not self.asleep or path not in USES_MEMORY, 500, f"{path} of one that sleeps")
        match path:
            case "/sleep" | "/wake_up":
                self.asleep = path == "/sleep"
            case "/health" | "/reset_prefix_cache":
                pass
            case "/weight_info":
                return {"weight_version": self.version}
            case "/v1/models":
                return {"data": [{"id": self.model, "max_model_len": 2048}]}
            case "/get_world_size":
                return {"world_size": 1}
            case "/collective_rpc" if body["method"] == "describe_worker":
                return {"results": [{"dtype": f"torch.{self.dtype}", "can_sleep": self.frees}]}
            case "/collective_rpc":
                self.updating = self.updating and body["method"] != "abandon_weight_update"
                return {"results": [None if body["method"] != "name_gpu" else ""]}
            case "/pause":
                self.serving.clear()
            case "/resume":
                self.serving.set()
            case "/init_weight_transfer_engine":
                assert self.on_init is not None
                self.on_init(body["init_info"])
            case "/start_weight_update":
                self.require(not self.updating, 500, "an update is under way")
                self.updating, self.tensors = True, {}
            case "/update_weights":
                self.require(self.updating, 500, "no update is under way")
                self.update(body["update_info"])
            case "/finish_weight_update":
                self.require(self.updating, 500, "no update is under way")
                self.updating, self.version = False, body["weight_version"]
            case "/v1/completions":
                self.require(body["model"] == self.model, 404, "no such model")
                self.wait(self.serving)  # a paused vLLM takes requests, and lets them wait
                return self.complete(body)
            case "/v1/chat/completions":
                return {"choices": [{"message": {"role": "assistant", "content": "An answer."}}]}
            case _:
                raise Refused(404, {"error": "Not Found"})
        return {}

    def update(self, info: JSON) -> None:
        if self.on_update is not None:
            self.on_update(info)
            return
        if not self.reads:
            os.stat(f"/proc/{info['buffer']['process']}/fd/{info['buffer']['file']}")
            return
        self.tensors |= receive(self.url, info)

    def complete(self, body: JSON) -> JSON | bytes:
        prompt = body["prompt"]
        if "allowed_token_ids" in body:
            return {"choices": [{"logprobs": {"token_logprobs": [-9.0 if self.raw_log_probs else 0.0]}}]}
        if "prompt_logprobs" in body:
            scores = self.score(prompt) if self.score else [-1.0] * (len(prompt) - 1)
            entries = [{str(t): {"logprob": s}} for t, s in zip(prompt[1:], scores, strict=True)]
            return {"choices": [{"prompt_logprobs": [None, *entries]}]}
        self.bodies.append(body)
        fault = self.faults.popleft() if self.faults else self.always
        self.in_work += 1
        self.most_in_work = max(self.most_in_work, self.in_work)
        try:
            Event().wait(self.delay_s)
            if self.gate is not None:
                self.wait(self.gate)
        finally:
            self.in_work -= 1
        if fault.isdigit():
            raise Refused(int(fault), {"error": "out of order"})
        if fault == "restart":
            self.restart()
        if fault == "hang":
            self.awake.clear()
            self.wait(self.awake)
        if fault == "die":
            Thread(target=self.close).start()
        if fault in ("die", "drop"):
            raise Dropped
        choice = self.choice(body)
        if fault == "nan":
            choice["logprobs"]["token_logprobs"][0] = float("nan")
        else:
            self.delivered.append(prompt)
        return {"choices": [choice]}

    def choice(self, body: JSON) -> JSON:
        choice = made_up(body["prompt"], body["seed"], body["max_tokens"], self.endings)
        ending = choice.pop("ending")
        if self.draw is not None:
            choice["token_ids"], ending = self.draw(body)
        if self.sampled is not None:
            scores = self.sampled(body["prompt"] + choice["token_ids"], body["temperature"] or 1.0)
            choice["logprobs"] = {"token_logprobs": scores[len(body["prompt"]) - 1 :]}
        choice["index"] = 0
        choice["finish_reason"] = "length" if ending == "length" else "stop"
        choice["stop_reason"] = {"stop": "".join(body["stop"]), "eos": None, "length": None}[ending]
        return choice


GROUPS: dict[str, Any] = {}  # worker's name -> gloo group of this process


def worker_of(
    model: str, gloo: bool = False, dtype: str = "float32", samples: bool = False, **options: Any
) -> FakeWorker:
    """A fake worker that scores texts with the weights pushed to it; a plain one with those of the model.

    Args:
        model: Folder of the weights of its start.
        gloo: Whether weights come over gloo instead of in shared memory.
        dtype: Of its weights.
        samples: Whether it samples its completions from the model instead of making them up.
        options: Further options of the worker.
    """
    import torch

    from rlt_lightning.engines import HFEngine, SampleRequest, Sampling
    from rlt_lightning.models.load import load_model, load_tokenizer

    copy, lock = load_model(model, dtype), Lock()
    engine = HFEngine()
    if samples:
        engine.start(copy, load_tokenizer(model), Path())

    def load() -> None:
        if worker.dev_mode and not gloo:
            assert worker.tensors
            copy.load_state_dict(worker.tensors, strict=False)

    def draw(body: JSON) -> tuple[list[int], str]:
        sampling = Sampling(body["temperature"], max_completion_length=body["max_tokens"])
        with lock:
            load()
            request = SampleRequest(body["prompt"], body["seed"])
            [(_, completion)] = engine.sample([request], sampling, "".join(body["stop"]))
        return completion.token_ids, completion.finish_reason

    def score(token_ids: list[int], temperature: float = 1.0) -> list[float]:
        load()
        with torch.no_grad():
            logits = copy(torch.tensor([token_ids])).logits[0, :-1].float()
        log_probs = (logits / temperature).log_softmax(-1)
        return log_probs.gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1).tolist()

    if gloo:
        name = f"of {id(copy)}"
        options["on_init"] = lambda info: join_gloo(name, info)
        options["on_update"] = lambda info: copy.load_state_dict(receive(name, info), strict=False)
    worker = FakeWorker(
        **{"endings": ("length",), "score": score, "sampled": score, "dtype": dtype}
        | ({"draw": draw} if samples else {})
        | options
    )
    return worker


def join_gloo(name: str, info: JSON) -> None:
    """Do for a fake worker what a real one does at /init_weight_transfer_engine; here or in a process."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    from rlt_lightning.worker.gloo import join_group

    timeout_s, size = info["timeout_s"], info["world_size"]
    server = TCPStore(info["host"], info["port"], None, False, timedelta(seconds=timeout_s))
    store = PrefixStore(info["prefix"], server)
    GROUPS[name] = join_group(store, info["rank_offset"], size, timeout_s, info["host"])


READERS: dict[str, Any] = {}  # worker's name -> what reads the trainer's buffer in this process


def receive(name: str, info: JSON, dies_at: str = "") -> dict[str, Any]:
    """The whole tensors of one /update_weights; the process ends when it gets to one of them."""
    import torch

    from rlt_lightning.worker.gloo import build_broadcast_options
    from rlt_lightning.worker.ipc import TensorReader, open_buffer

    if "buffer" in info:
        content = open_buffer(info["buffer"], torch.device("cpu"))
    else:
        content = torch.empty(info["num_bytes"], dtype=torch.uint8)
        GROUPS[name].broadcast([content], build_broadcast_options()).wait()
    reader = READERS.setdefault(name, TensorReader(torch.device("cpu")))
    tensors = {}
    for tensor_name, tensor in reader.read(content, info["parts"]):
        if tensor_name == dies_at:
            os._exit(1)
        tensors[tensor_name] = tensor
    return tensors


def fake_vllm(folder: Path) -> str:
    """Write a program that takes `vllm serve`'s command line; returns its path."""
    program = folder / "fake-vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    program.chmod(0o755)
    return str(program)


if __name__ == "__main__":
    words = sys.argv[1:]
    FakeWorker(
        port=int(words[words.index("--port") + 1]),
        model=words[words.index("--served-model-name") + 1],
        api_key=os.environ.get("VLLM_API_KEY"),
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        reads=False,
    )
    Event().wait()
