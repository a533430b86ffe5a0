"""A pretended SGLang server: its routes over HTTP, a real model that loads what is pushed, and faults."""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import torch
from fake_worker import listen
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

JSON = dict[str, Any]
# All that SGLang 0.5 knows: it refuses others.
PARAMS = {"max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p"}
PARAMS |= {"repetition_penalty", "sampling_seed", "logit_bias"}


class Refused(Exception):
    """Answer with this status and text."""


class FakeSGLang:
    """One server with the weights of a folder.

    Args:
        model: The folder.
        faults: Of the next sampling calls, one each: 500, garbage, empty, abort, short, other, hang, die; "":
            none.
        ignores_pushes: Whether it says that it has loaded weights, but has not.
        port: Where it listens; 0: anywhere.
    """

    def __init__(
        self, model: str, faults: tuple[str, ...] = (), ignores_pushes: bool = False, port: int = 0
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.version = "default"
        self.faults, self.ignores_pushes = deque(faults), ignores_pushes
        self.calls: list[str] = []
        self.bodies: list[JSON] = []  # of the sampling calls
        self.sampled_with: list[str] = []  # the version of each completion
        self.turn, self.closed = Lock(), Event()
        self.server = listen(self.handle, port)
        self.port = self.server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeSGLang:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse connections from now on."""
        if not self.closed.is_set():
            self.closed.set()
            self.server.shutdown()
            self.server.server_close()

    def handle(self, call: BaseHTTPRequestHandler) -> None:
        self.calls.append(f"{call.command} {call.path}")
        length = int(call.headers.get("Content-Length") or 0)
        body = json.loads(call.rfile.read(length)) if length else {}
        try:
            status, answer = 200, self.answer(f"{call.command} {call.path}", body)
        except Refused as refused:
            status, answer = refused.args
        except ConnectionError:
            call.close_connection = True
            return
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with suppress(ConnectionError):  # the caller may have given up
            call.send_response(status)
            call.send_header("Content-Length", str(len(content)))
            call.end_headers()
            call.wfile.write(content)

    def answer(self, route: str, body: JSON) -> JSON | bytes:
        match route:
            case "GET /health":
                return b""
            case "GET /v1/models":
                return {"object": "list", "data": [{"id": "teacher", "max_model_len": 2048}]}
            case "GET /model_info":
                return {"model_path": "teacher", "is_generation": True, "weight_version": self.version}
            case "POST /update_weights_from_disk":
                with self.turn:
                    self.load(Path(body["model_path"]))
                self.version = body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights."}
            case "POST /generate":
                return self.generate(body)
        raise Refused(404, {"detail": "Not Found"})

    def load(self, folder: Path) -> None:
        """Load a folder as SGLang does, every weight of it."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise Refused(400, {"success": False, "message": f"no safetensors in {folder}"})
        if self.ignores_pushes:
            return
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        tied = set(self.model.state_dict()) - set(dict(self.model.named_parameters()))
        assert not unexpected
        assert set(missing) <= tied

    def generate(self, body: JSON) -> JSON | bytes:
        params = body["sampling_params"]
        if not body["return_logprob"] or set(params) - PARAMS:
            raise Refused(400, {"error": {"message": f"unexpected {set(params) - PARAMS}"}})
        if "logprob_start_len" in body:  # a text to be scored
            ids = body["input_ids"]
            with self.turn, torch.no_grad():
                table = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            scores = [None, *(float(table[i, token]) for i, token in enumerate(ids[1:]))]
            entries = [[score, token, None] for score, token in zip(scores, ids, strict=True)]
            return {"text": "", "output_ids": [0], "meta_info": {"input_token_logprobs": entries}}
        self.bodies.append(body)
        fault = self.faults.popleft() if self.faults else ""
        if fault.isdigit():
            raise Refused(int(fault), {"error": {"message": "out of order"}})
        if fault == "garbage":
            return b"<html>not what you wanted</html>"
        if fault == "hang":
            self.closed.wait()
        if fault == "die":
            Thread(target=self.close).start()
        if fault in ("hang", "die"):
            raise ConnectionAbortedError
        with self.turn:
            answer = self.complete(body["input_ids"], params)
            self.sampled_with.append(self.version)
        meta = answer["meta_info"]
        if fault == "empty":
            del meta["output_token_logprobs"]
        if fault == "abort":
            meta["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
        if fault == "short":
            del meta["output_token_logprobs"][-1]
        if fault == "other":
            meta["weight_version"] = "default"
        return answer

    @torch.no_grad()
    def complete(self, prompt: list[int], params: JSON) -> JSON:
        """Sample in the slow and obvious way; log-probs are those of the whole distribution."""
        generator = torch.Generator().manual_seed(params["sampling_seed"])
        output: list[int] = []
        entries, temperature = [], params["temperature"] or 1.0
        reason: JSON | None = None
        while reason is None:
            logits = self.model(torch.tensor([prompt + output])).logits[0, -1].float() / temperature
            for word, bias in params["logit_bias"].items():
                logits[int(word)] += bias
            probs = logits.softmax(-1)
            token = int(
                probs.multinomial(1, generator=generator) if params["temperature"] else probs.argmax()
            )
            output.append(token)
            entries.append([float(logits.log_softmax(-1)[token]), token, None])
            text = self.tokenizer.decode(output)
            if len(output) == params["max_new_tokens"]:  # SGLang looks at this first
                reason = {"type": "length", "length": len(output)}
            elif token in params["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
            elif params["stop"] and params["stop"] in text:
                reason = {"type": "stop", "matched": params["stop"]}
        meta = {"finish_reason": reason, "weight_version": self.version, "output_token_logprobs": entries}
        return {"text": text, "output_ids": output, "meta_info": meta | {"prompt_tokens": len(prompt)}}
