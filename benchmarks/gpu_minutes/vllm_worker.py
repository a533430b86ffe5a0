"""A real vLLM worker: pushes and their check, throughput, seeds, sleep, and what float32 logits are worth.

python vllm_worker.py SECONDS       which bounds the whole; VLLM names vLLM's command
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import DEVICE, HALF, ON_CPU, OUT, TINY, Finding, attempt, find_vllm, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlt_lightning.engines import IPCPush, Launch, SampleRequest, Sampling, VLLMEngine
from rlt_lightning.engines.threads import run_coroutine
from rlt_lightning.models.packed import sequence_log_probs

BOUND = 1e-3 if ON_CPU else 0.05  # nats between the worker's and the trainer's log-probs, mean over tokens
ROWS, LENGTH = ((2, 4), 8) if TINY else ((64, 256), 512)
# vLLM asserts on free memory: the share must hold what the trainer leaves, 8 GiB of which are the cache.
ARGUMENTS = ["--kv-cache-memory-bytes", str(2**28 if ON_CPU else 2**33), "--max-num-seqs", "256"]
ARGUMENTS += [] if ON_CPU else ["--enable-sleep-mode", "--gpu-memory-utilization", "0.4"]
# CUDA graphs of the decode step without torch.compile, and without warming up kernels, start in seconds.
SIZES = [1, 2, 4, 8, *range(16, 257, 16)]
GRAPHS = ["--compilation-config"]
GRAPHS += [json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES})]
WARM_UPS = ("enable_jit_warmup", "enable_cutedsl_warmup", "enable_flashinfer_autotune")
GRAPHS += ["--kernel-config", json.dumps(dict.fromkeys(WARM_UPS, False))]


def launch(eager: bool, *more: str) -> dict[str, Any]:
    """Return the settings of the worker."""
    return {
        "executable": os.environ["VLLM"],
        "dtype": str(HALF)[6:],
        "max_model_len": 2048,
        "gpus": None if ON_CPU else [[0]],
        "arguments": [*ARGUMENTS, *(["--enforce-eager"] if eager or ON_CPU else GRAPHS), *more],
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"} if ON_CPU else {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
        "start_deadline_s": 600.0 if ON_CPU else 120.0,
    }


def used_gib() -> float:
    """Return the GPU's memory in use, of all processes."""
    if ON_CPU:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


class Meeting:
    """The package's engine with one launched worker, and the trainer's model beside it."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        with DEVICE:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=HALF).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        push = IPCPush(timeout_s=60)
        deadline_s = 600.0 if ON_CPU else 60.0  # a busy CPU compiles in the first call
        self.engine = VLLMEngine(
            launch=Launch(**settings), push=push, sleep=not ON_CPU, call_timeout_s=deadline_s
        )
        torch.manual_seed(0)
        self.text: list[int] = torch.randint(60, (64,)).tolist()
        self.versions: dict[int, list[float]] = {}  # the trainer's log-probs of the text, by version

    def start(self) -> Finding:
        self.engine.start(self.model, self.tokenizer, OUT / "runs" / "vllm")
        return True, {"used_gib": used_gib()}

    @torch.no_grad()
    def score(self, ids: list[int], temperature: float = 1.0) -> Tensor:
        """Return the trainer's log-probs of all tokens but the first, whose logits are float32."""
        return sequence_log_probs(self.model, ids, temperature).cpu()

    def push(self) -> Finding:
        """Push; the worker's log-probs must be those of this version, and no buffer may stay behind."""
        version, begin = len(self.versions), time.monotonic()
        before = torch.cuda.memory_allocated()
        self.engine.update_weights(list(self.model.named_parameters()), version)
        seconds = time.monotonic() - begin
        left_mib = (torch.cuda.memory_allocated() - before) / 2**20
        self.versions[version] = self.score(self.text).tolist()
        self.engine.verify(self.text, dict(self.versions))
        scores = run_coroutine(self.engine.fleet.workers[0].score(self.text, 30))
        nats = [fmean(abs(a - b) for a, b in zip(scores, x, strict=True)) for x in self.versions.values()]
        fields = {"push_s": seconds, "nats_to_versions": nats, "left_mib": left_mib}
        is_held = self.engine.policy_version == version  # a worker that was lost holds none
        return nats[-1] < BOUND and left_mib == 0 and is_held, fields

    def sample(self, prompt: list[int], rows: int, length: int) -> list[Any]:
        request = [SampleRequest(prompt, seed=7, num_completions=rows)]
        found = self.engine.sample(request, Sampling(max_completion_length=length), "</never>")
        return [completion for _, completion in sorted(found, key=lambda pair: pair[0])]

    def throughput(self, rows: int) -> Finding:
        prompt = torch.randint(60, (512,)).tolist()
        self.sample(prompt, rows, 16)
        begin = time.monotonic()
        tokens = sum(len(completion.token_ids) for completion in self.sample(prompt, rows, LENGTH))
        return tokens == rows * LENGTH, {"tokens_per_s": tokens / (time.monotonic() - begin)}

    def mismatch(self) -> Finding:
        """Compare log-probs of sampled tokens at temperature 0.7 with the trainer's."""
        nats: list[float] = []
        for completion in self.sample(self.text, 8, LENGTH // 4):
            log_probs = self.score(self.text + list(completion.token_ids), 0.7)[len(self.text) - 1 :]
            nats += (log_probs - torch.tensor(completion.log_probs)).abs().tolist()
        return fmean(nats) < BOUND, {"mean_nats": fmean(nats), "max_nats": max(nats), "tokens": len(nats)}

    def seeds(self) -> Finding:
        """Ask for the same twice: how many tokens are the same?"""
        first, second = (self.sample(self.text, 4, LENGTH // 4) for _ in range(2))
        pairs = [zip(a.token_ids, b.token_ids, strict=True) for a, b in zip(first, second, strict=True)]
        return None, {"equal_frac": fmean(a == b for pair in pairs for a, b in pair)}

    @torch.no_grad()
    def other_weights(self) -> Finding:
        for parameter in self.model.model.layers.parameters():
            parameter += torch.randn_like(parameter) * parameter.float().std().nan_to_num() * 0.3
        return self.push()

    def sleep(self) -> Finding:
        before = used_gib()
        self.engine.put_to_sleep()
        asleep = used_gib()
        return asleep < before, {"awake_gib": before, "asleep_gib": asleep}

    def run(self, name: str, steps: dict[str, Callable[[], Finding]]) -> bool:
        """Start, push and do more, each step with a line; return whether nothing failed."""
        steps = {"start": self.start, "push": self.push, **steps}
        try:
            return all([attempt(f"{name}, {step}", function) for step, function in steps.items()])
        finally:
            self.engine.close()

    def run_all(self) -> bool:
        steps: dict[str, Callable[[], Finding]] = {"mismatch": self.mismatch}
        steps |= {f"{rows} rows": partial(self.throughput, rows) for rows in ROWS}
        steps |= {"seeds": self.seeds, "push of other weights": self.other_weights}
        steps |= {} if ON_CPU else {"sleep": self.sleep, "push after sleep": self.push}
        return self.run("vllm", steps | {"mismatch at the end": self.mismatch})


def main() -> None:
    if not find_vllm():
        return
    model = make_model("tiny" if TINY else "qwen2.5-0.5b")
    passed = Meeting(model, launch(eager=False)).run_all()
    torch.cuda.empty_cache()
    # On a GPU launched workers have float32 logits by default: what if not? The bounds are for those with.
    rounded = Meeting(model, launch(True, "--hf-overrides", "{}"))
    rounded.run("vllm without float32 logits", {"mismatch": rounded.mismatch})
    sys.exit(not passed)


if __name__ == "__main__":
    main()
