"""A real vLLM worker: pushes and their check, throughput, seeds, sleep; then `rlt fit` by turns with it.

python vllm_worker.py SECONDS       which bounds the whole; VLLM names vLLM's command
"""

from __future__ import annotations

import csv
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from common import DEVICE, HALF, ON_CPU, OUT, TINY, Finding, attempt, make_model, note
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlt_lightning.engines import IPCPush, Launch, SampleRequest, Sampling, VLLMEngine, sample_all
from rlt_lightning.engines.threads import run_coroutine

STEPS, KILLED = (2, 0) if TINY else (5, 2)  # iterations, and the one in which the sleeping worker is killed
BOUND = 1e-3 if ON_CPU else 0.05  # nats between the worker's and the trainer's log-probs, mean over tokens
ROWS, LENGTH = ((2, 4), 8) if TINY else ((64, 256), 512)
# vLLM asserts on free memory: the share must hold what the trainer leaves, 8 GiB of which are the cache.
ARGUMENTS = ["--kv-cache-memory-bytes", str(2**28 if ON_CPU else 2**33), "--max-num-seqs", "256"]
ARGUMENTS += [] if ON_CPU else ["--enable-sleep-mode", "--gpu-memory-utilization", "0.4"]
# CUDA graphs of the decode step without torch.compile start in seconds.
GRAPHS = ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']


def launch(eager: bool) -> dict[str, Any]:
    """Return the settings of the worker."""
    return {
        "executable": os.environ["VLLM"],
        "dtype": str(HALF)[6:],
        "max_model_len": 2048,
        "gpus": None if ON_CPU else [[0]],
        "arguments": [*ARGUMENTS, *(["--enforce-eager"] if eager or ON_CPU else GRAPHS)],
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

    def __init__(self, folder: Path) -> None:
        with DEVICE:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=HALF).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        push = IPCPush(timeout_s=60)
        self.engine = VLLMEngine(launch=Launch(**launch(False)), push=push, sleep=not ON_CPU)
        torch.manual_seed(0)
        self.text: list[int] = torch.randint(60, (64,)).tolist()
        self.versions: dict[int, list[float]] = {}  # the trainer's log-probs of the text, by version

    def start(self) -> Finding:
        self.engine.start(self.model, self.tokenizer, OUT / "runs" / "vllm")
        return True, {"used_gib": used_gib()}

    @torch.no_grad()
    def score(self, ids: list[int], temperature: float = 1.0) -> Tensor:
        """Return the trainer's log-probs of all tokens but the first."""
        row = torch.tensor(ids, device=DEVICE)
        logits = self.model(row[None], use_cache=False).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0].cpu()

    def push(self) -> Finding:
        """Push; the worker's log-probs must be those of this version, and not of the one before."""
        version, begin = len(self.versions), time.monotonic()
        self.engine.update_weights(list(self.model.named_parameters()), version)
        seconds = time.monotonic() - begin
        self.versions[version] = self.score(self.text).tolist()
        self.engine.verify(self.text, dict(self.versions))
        scores = run_coroutine(self.engine.fleet.workers[0].score(self.text, 30))
        nats = [fmean(abs(a - b) for a, b in zip(scores, x, strict=True)) for x in self.versions.values()]
        return nats[-1] < BOUND, {"push_s": seconds, "nats_to_versions": nats}

    def sample(self, prompt: list[int], rows: int, length: int) -> list[Any]:
        request = [SampleRequest(prompt, seed=7, num_completions=rows)]
        [completions] = sample_all(self.engine, request, Sampling(max_completion_length=length), "</never>")
        return completions

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
        self.engine.health()
        return asleep < before, {"awake_gib": before, "asleep_gib": asleep, "woken_gib": used_gib()}

    def run(self) -> bool:
        """Do all of it, each step with a line; return whether nothing failed."""
        steps: dict[str, Callable[[], Finding]] = {"start": self.start, "push": self.push}
        steps |= {f"{rows} rows": partial(self.throughput, rows) for rows in ROWS}
        steps |= {"mismatch": self.mismatch, "seeds": self.seeds, "push of other weights": self.other_weights}
        steps |= {} if ON_CPU else {"sleep": self.sleep, "push after sleep": self.push}
        steps["mismatch at the end"] = self.mismatch
        try:
            return all([attempt(f"vllm, {name}", step) for name, step in steps.items()])
        finally:
            self.engine.close()


def turns(model: Path, seconds: float) -> Finding:
    """Let `rlt fit` and its worker take turns, as on one GPU; kill the sleeping worker once."""
    run, events = OUT / "runs" / "turns", OUT / "runs" / "turns.events"
    shutil.rmtree(run, ignore_errors=True)
    events.unlink(missing_ok=True)
    watch = {"path": str(events), "kills": {KILLED: "asleep engine"}}
    options: dict[str, Any] = {
        "model.teacher": model,
        "model.student": model,
        "model.group_size": 4 if TINY else 16,
        "data.source": "chains",
        "data.num_embedded_rows": 64,
        "data.prompts_per_step": 2 if TINY else 8,
        "rollouts.sampling.max_completion_length": LENGTH,
        "rollouts.engine": "VLLMEngine",
        "rollouts.engine.init_args.launch": json.dumps(launch(eager=True)),
        "rollouts.engine.init_args.sleep": "false" if ON_CPU else "true",
        "trainer.accelerator": "cpu" if ON_CPU else "gpu",
        "trainer.precision": "32-true" if ON_CPU else "bf16-mixed",
        "trainer.max_steps": STEPS,
        "trainer.callbacks+": json.dumps({"class_path": "turns.WorkerWatch", "init_args": watch}),
        "checkpoint.save_top_k": 0,
        "export.enabled": "false",
        "output_dir": run,
    }
    command = [sys.executable, "-m", "rlt_lightning", "fit", "--config", "own_rows/rlt"]
    command += ["--config", "hardware/1gpu_80gb", *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, timeout=seconds)
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    names = [f"perf/{phase}_s" for phase in ("generate", "push", "score", "train")]
    fields = {name: median(float(row[name]) for row in rows) for name in names}
    happened = [json.loads(line)["event"] for line in events.open()]
    came_back = "verify" in happened[happened.index("kill") :]
    return done.returncode == 0 and came_back, fields | {"steps": len(rows), "events": " ".join(happened)}


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    if not Path(os.environ["VLLM"]).exists():
        note("vllm", why=f"skipped: {os.environ['VLLM']} is not there; the extra vllm brings it")
        return
    model = make_model("tiny" if TINY else "qwen2.5-0.5b")
    passed = Meeting(model).run()
    gc.collect()
    torch.cuda.empty_cache()
    passed &= attempt("vllm, turns with a killed worker", partial(turns, model, end - time.monotonic()))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
