"""RLT on rows of one's own, on one GPU with `hardware/1gpu_80gb`: seconds and memory by phase, and the plan.

    python own.py SECONDS [MODEL ...]

The in-process engine takes vLLM's place. The models have the shapes of SmolLM2-135M and Qwen2.5-0.5B and
random weights, so every completion is as long as it may be.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import torch
from common import ON_CPU, TINY, Finding, attempt
from findings import STORE
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlt_lightning.models.embedded import MINIATURES

GIB = 2**30
STEPS, LENGTH, PROMPTS, GROUP = (2, 8, 2, 4) if TINY else (2, 128, 16, 16)
PHASES = ("generate", "push", "score", "train")
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "smollm2-135m": (LlamaConfig, LlamaForCausalLM, SMOLLM2),
    "qwen2.5-0.5b": (Qwen2Config, Qwen2ForCausalLM, gpu.SHAPES["qwen2.5-0.5b"]),
    "tiny": (Qwen2Config, Qwen2ForCausalLM, gpu.SHAPES["tiny"]),
}


@torch.no_grad()
def make_model(name: str) -> Path:
    """Save a model with random weights that samples words of the miniature's tokenizer, but never its end.

    Dimension 0 of the hidden state is the same for every word, and tells the head which words there are.
    """
    folder = STORE / "models" / name
    if (folder / "config.json").exists():
        return folder
    configuration, family, shape = MODELS[name]
    tokenizer = AutoTokenizer.from_pretrained(str(MINIATURES["miniature"]))
    torch.manual_seed(0)
    config = configuration(
        **shape, max_position_embeddings=8192, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.device("cpu" if ON_CPU else "cuda"):
        model = family(config)
    embedding = model.get_input_embeddings().weight  # (V, H), the head's weight, too
    embedding[:, 0] = -4.0
    embedding[: len(tokenizer), 0] = 4.0
    embedding[tokenizer.all_special_ids, 0] = 0.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(model: Path) -> list[str]:
    """Return the command line that the plan and the run share."""
    options = {
        "model.teacher": model,
        "model.student": model,
        "data.source": "chains",
        "data.num_embedded_rows": 64,
        "data.prompts_per_step": PROMPTS,
        "model.group_size": GROUP,
        "rollouts.engine": "rlt_lightning.engines.HFEngine",
        "rollouts.engine.init_args.max_sequences": PROMPTS * GROUP,
        "rollouts.sampling.max_completion_length": LENGTH,
        "trainer.max_steps": STEPS,
        "output_dir": STORE / "runs" / f"own_{model.name}",
    }
    words = ["--config", "own_rows/rlt", "--config", "hardware/1gpu_80gb"]
    return words + [word for key, value in options.items() for word in (f"--{key}", str(value))]


def start(verb: str, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rlt_lightning", verb, *words]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def measure(name: str, end: float) -> Finding:
    """Run two iterations, and return the second one's figures, with those of the plan."""
    model, logs = make_model(name), STORE / "logs"
    if not ON_CPU:
        torch.cuda.empty_cache()  # the run counts its own memory
    logs.mkdir(parents=True, exist_ok=True)
    words, run, plan = settings(model), STORE / "runs" / f"own_{name}", logs / f"plan_{name}.json"
    shutil.rmtree(run, ignore_errors=True)
    updates = run.with_name(f"{run.name}.updates")
    updates.unlink(missing_ok=True)
    planning = start("plan", [*words, "--plan.json", str(plan)], logs / f"plan_{name}.log")
    os.environ["UPDATES"] = str(updates)
    few = ["--trainer.callbacks+", "update_timer.UpdateTimer", "--checkpoint.save_top_k", "0"]
    few += ["--export.enabled", "false", "--trainer.limit_val_batches", "0"]
    few += ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true"] if ON_CPU else []
    began = time.monotonic()
    running = start("fit", [*words, *few], logs / f"own_{name}.log")
    try:
        status: Any = running.wait(max(5.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        running.kill()
        status = "no end in time"
    seconds = time.monotonic() - began
    rows = read_steps(run / "metrics.csv")
    fields: dict[str, Any] = {"status": status, "run_s": seconds, "steps": len(rows), "tokens": LENGTH}
    fields |= {"prompts": PROMPTS, "group_size": GROUP}
    if rows:
        fields |= {key: float(value) for key, value in rows[-1].items() if key.startswith("perf/") and value}
        fields["first_step"] = {f"{phase}_s": float(rows[0][f"perf/{phase}_s"]) for phase in PHASES}
    if updates.exists():
        fields["update_s"] = [float(line) for line in updates.read_text().split()]
    try:
        planning.wait(max(5.0, end - time.monotonic()))
        planned = json.loads(plan.read_text())["phases"]
        runtime = planned["start"]["device"].get("runtime", 0.0)  # which PyTorch does not count
        fields["planned_gib"] = {key: (row["total"] - runtime) / GIB for key, row in planned.items()}
    except (subprocess.TimeoutExpired, FileNotFoundError):
        planning.kill()
        fields["planned_gib"] = None
    return (status == 0) and fields["planned_gib"] is not None, fields


def read_steps(file: Path) -> list[dict[str, str]]:
    """Return the rows of the iterations that ended."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if row.get("perf/train_s")]


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    names = sys.argv[2:] or (["tiny"] if TINY else ["smollm2-135m", "qwen2.5-0.5b"])
    for number, name in enumerate(names):
        left = end - time.monotonic()  # each gets its share of it
        attempt(f"own, {name}", partial(measure, name, time.monotonic() + left / (len(names) - number)))


if __name__ == "__main__":
    main()
