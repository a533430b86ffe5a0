"""A pretended SGLang server: its routes over HTTP, and a real model that loads what is pushed."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import torch
from fake_worker import JSON, FakeWorker, Refused
from safetensors.torch import load_file

from rlt_lightning.engines import HFEngine, SampleRequest, Sampling
from rlt_lightning.models.load import load_model, load_tokenizer

# All that SGLang 0.5 knows: it refuses others.
PARAMS = {"max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p"}
PARAMS |= {"repetition_penalty", "sampling_seed", "logit_bias"}


class FakeSGLang(FakeWorker):
    """One server with the weights of a folder.

    Args:
        folder: The folder.
        ignores_pushes: Whether it says that it has loaded weights, but has not.
    """

    def __init__(self, folder: str, ignores_pushes: bool = False) -> None:
        self.copy, self.turn, self.ignores_pushes = load_model(folder), Lock(), ignores_pushes
        self.engine = HFEngine()
        self.engine.start(self.copy, load_tokenizer(folder), Path())
        self.sampled_with: list[str] = []  # the version of each completion
        super().__init__()

    def answer(self, path: str, body: JSON) -> JSON:
        match path:
            case "/model_info":
                return {"model_path": "teacher", "is_generation": True, "weight_version": self.version}
            case "/update_weights_from_disk":
                with self.turn:
                    self.load(Path(body["model_path"]))
                self.version = body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights."}
            case "/generate":
                unknown = set(body["sampling_params"]) - PARAMS
                self.require(body["return_logprob"] and not unknown, 400, f"unexpected {unknown}")
                with self.turn:
                    return (self.score_text if "logprob_start_len" in body else self.write)(body)
            case "/health" | "/v1/models":
                return super().answer(path, body)
        raise Refused(404, {"detail": "Not Found"})

    def load(self, folder: Path) -> None:
        """Load a folder as SGLang does, every weight of it."""
        files = sorted(folder.glob("*.safetensors"))
        self.require(bool(files), 400, f"no safetensors in {folder}")
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert weights.keys() == dict(self.copy.named_parameters()).keys()
        if not self.ignores_pushes:
            self.copy.load_state_dict(weights, strict=False)

    def score_text(self, body: JSON) -> JSON:
        ids = body["input_ids"]
        with torch.no_grad():
            table = self.copy(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        scores = [None, *(float(table[i, token]) for i, token in enumerate(ids[1:]))]
        entries = [[score, token, None] for score, token in zip(scores, ids, strict=True)]
        return {"text": "", "output_ids": [0], "meta_info": {"input_token_logprobs": entries}}

    def write(self, body: JSON) -> JSON:
        params = body["sampling_params"]
        sampling = Sampling(params["temperature"], max_completion_length=params["max_new_tokens"])
        request = SampleRequest(body["input_ids"], params["sampling_seed"])
        [(_, sampled)] = self.engine.sample([request], sampling, params["stop"] or "")
        self.sampled_with.append(self.version)
        entries = [[p, i, None] for p, i in zip(sampled.log_probs, sampled.token_ids, strict=True)]
        reason = "length" if sampled.finish_reason == "length" else "stop"
        meta: dict[str, Any] = {"finish_reason": {"type": reason}, "weight_version": self.version}
        return {"meta_info": meta | {"output_token_logprobs": entries}}
