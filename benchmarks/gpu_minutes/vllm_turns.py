"""`rlt fit` takes turns with a real vLLM worker, as on one GPU; the sleeping worker is killed once.

python vllm_turns.py SECONDS       which bounds the whole; VLLM names vLLM's command
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import ON_CPU, OUT, TINY, Finding, attempt, find_vllm, make_model
from vllm_worker import LENGTH, launch

STEPS, KILLED = (2, 0) if TINY else (5, 2)  # iterations, and the one in which the sleeping worker is killed


def turns(model: Path, seconds: float) -> Finding:
    """Run it, and look for the worker's return."""
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
    if find_vllm():
        model = make_model("tiny" if TINY else "qwen2.5-0.5b")
        job = partial(turns, model, float(sys.argv[1]) - 15)
        sys.exit(not attempt("vllm, turns with a killed worker", job))


if __name__ == "__main__":
    main()
