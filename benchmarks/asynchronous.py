"""What overlap saves: the time of a step with sampling beside training, and with scoring beside sampling.

    .venv/bin/python benchmarks/asynchronous.py [--steps 8]

Three comparisons in one run, with the settings of configs/laptop/smollm2_rlt.yaml:

* scoring early: synchronous steps with `rollouts.score_early` off and on. The worker is a stand-in that does
  not compute. Its completions come one after another, over twice the time that scoring takes here. Rewards of
  both sides must agree.
* two machines: asynchronous against synchronous. The stand-in plays a second machine: it waits for as long
  as scoring and training take here, then returns made-up completions all at once. This shows the overlap
  itself, at the point where sampling and training take equally long.
* one machine: a real vLLM worker (scripts/setup_vllm_cpu.sh) beside the trainer on the same cores, where the
  two slow each other.

A step's time is the sum of its phases in metrics.csv, the first two steps left out.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import yaml
from side_by_side import benchmark_parser, finish, read_options
from small_models import make_model

from rlt_lightning.models.embedded import embedded_model
from rlt_lightning.models.load import load_model
from rlt_lightning.models.packed import sequence_log_probs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from fake_worker import FakeWorker  # noqa: E402  (the stand-in of the tests)

GOAL = 0.77
WARM_UP = 2
GROUP_SIZE = 2
PHASES = ("generate", "push", "score", "train")
SAMPLING_TO_SCORING = 2.0
TINY_S = 0.1  # seconds that the stand-in takes at tiny size
SAME_REWARD = 1e-3  # nats: chunks make other micro-batches


@dataclass(frozen=True)
class Setting:
    """What is trained, and for how many steps that count."""

    config: str
    model: str
    steps: int
    length: int  # tokens of a completion
    group_size: int = GROUP_SIZE
    micro_batch_tokens: int = 2048  # a chunk of completions has as many at least
    further: tuple[str, ...] = ()  # options of the run


class Staggered(FakeWorker):
    """A stand-in whose completions end one after another, each at a time that its seed decides.

    A request for several completions ends with its last one.
    """

    spread_s = 0.0  # until the last one ends

    def complete(self, body: dict[str, Any]) -> Any:
        if "n" in body and "allowed_token_ids" not in body:
            ends = [Random(body["seed"] + i).random() for i in range(body["n"])]
            Event().wait(self.spread_s * max(ends))
        return super().complete(body)


def step_times(
    name: str, engine: dict[str, Any], asynchronous: bool, setting: Setting, score_early: bool = True
) -> dict[str, Any]:
    """Run and return the mean seconds of each phase of a step, their sum, and the rewards of all steps."""
    rollouts = {
        "engine": {"class_path": "rlt_lightning.engines.VLLMEngine", "init_args": engine},
        "asynchronous": asynchronous,
        "score_early": score_early,
        "verify_every_n_steps": 0,  # the stand-in answers for the first weights only
        "sampling": {"max_completion_length": setting.length},
    }
    model = {"importance_sampling": {"class_path": "rlt_lightning.numerics.TruncatedImportanceSampling"}}
    arguments: dict[str, Any] = model | {"max_staleness": int(asynchronous)}
    arguments |= {
        "mismatch_limit": None,
    }  # its log-probs are those of the first weights
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) / "overlay.yaml"
        trainer = {"max_steps": WARM_UP + setting.steps}
        overlay.write_text(
            yaml.safe_dump({"trainer": trainer, "rollouts": rollouts, "model": {"init_args": arguments}})
        )
        command = [sys.executable, "-m", "rlt_lightning", "fit", f"--config={setting.config}"]
        command += [f"--config={overlay}", f"--output_dir={folder}/run", "--export.enabled=false"]
        command += [f"--model.micro_batch_tokens={setting.micro_batch_tokens}"]
        command += [f"--model.group_size={setting.group_size}", "--checkpoint.every_n_train_steps=1000"]
        command += [f"--model.teacher={setting.model}", f"--model.student={setting.model}"]
        command += ["--trainer.precision=32-true", "--model.student_dtype=float32", *setting.further]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        with open(f"{folder}/run/metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    rewards = [float(row["reward/mean"]) for row in rows]
    rows = rows[WARM_UP:]
    if asynchronous:
        assert all(float(row["rollout/staleness"]) == 1 for row in rows)
    means = {phase: statistics.mean(float(row[f"perf/{phase}_s"]) for row in rows) for phase in PHASES}
    print(name, {phase: round(seconds, 2) for phase, seconds in means.items()}, flush=True)
    return means | {"step": sum(means.values()), "rewards": rewards}


def first_log_probs(name: str) -> Any:
    """Return a function that scores a text with the first weights."""
    model = load_model(name, "float32", None, False)

    return lambda text: sequence_log_probs(model, text).tolist()


def compare_scoring(
    engine: dict[str, Any], setting: Setting, worker: Staggered, scoring_s: float | None
) -> dict[str, Any]:
    """Compare scoring at the end with scoring while others are sampled; `scoring_s` None: it is measured."""
    if scoring_s is None:
        one = replace(setting, steps=1)
        scoring_s = step_times("scoring early, sampling at once", engine, False, one, False)["score"]
    worker.spread_s = SAMPLING_TO_SCORING * scoring_s
    late = step_times("scoring early, off", engine, False, setting, score_early=False)
    early = step_times("scoring early, on", engine, False, setting)
    worker.spread_s = 0.0
    difference = max(abs(a - b) for a, b in zip(early["rewards"], late["rewards"], strict=True))
    assert difference < SAME_REWARD, difference
    ratio = early["step"] / late["step"]
    print(f"scoring early: ratio {ratio:.2f}, rewards equal to {difference:.1e}")
    return {"off": late, "on": early, "ratio": ratio, "largest_reward_difference": difference}


def compare(name: str, engine: dict[str, Any], setting: Setting) -> dict[str, Any]:
    synchronous = step_times(f"{name}, synchronous", engine, False, setting)
    asynchronous = step_times(f"{name}, asynchronous", engine, True, setting)
    ratio = asynchronous["step"] / synchronous["step"]
    print(f"{name}: ratio {ratio:.2f}")
    return {"synchronous": synchronous, "asynchronous": asynchronous, "ratio": ratio}


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=None)
    parser.add_argument("--steps", type=int, default=8)
    options = read_options(parser, steps=1)
    setting = Setting("configs/laptop/smollm2_rlt.yaml", "smollm2-135m", options.steps, 32)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as models:
        if options.tiny:  # the stand-in sends words that the miniature does not have
            model = make_model(Path(models), 64, 1, 0, str(embedded_model()))
            few_rows = ("--data.prompts_per_step=2", "--data.num_embedded_rows=16")
            setting = Setting("configs/laptop/rlt.yaml", model, options.steps, 8, further=few_rows)
        compare_all(options, setting, results)
    early = results["scoring early"]["ratio"]
    finish(options.output, results, ratio=results["two machines"]["ratio"], goal=GOAL, early=early)


def compare_all(options: Any, setting: Setting, results: dict[str, Any]) -> None:
    """Run all comparisons, one machine only where vLLM is installed."""
    with Staggered(score=first_log_probs(setting.model), endings=("length",)) as worker:
        push = {"class_path": "rlt_lightning.engines.IPCPush"}
        engine = {"urls": [worker.url], "push": push}
        few = {} if options.tiny else {"length": 64, "group_size": 4}
        chunks = replace(setting, **few, micro_batch_tokens=32 if options.tiny else 256)
        results["scoring early"] = compare_scoring(engine, chunks, worker, TINY_S if options.tiny else None)
        if options.tiny:
            worker.delay_s = TINY_S
        else:
            half = replace(setting, steps=options.steps // 2)
            alone = step_times("two machines, sampling at once", engine, False, half)
            worker.delay_s = alone["step"] - alone["generate"]
        results["two machines"] = compare("two machines", engine, setting)
    if not options.tiny and Path(sys.executable).with_name("vllm").exists():
        overlay = yaml.safe_load((ROOT / "configs/add/vllm_launch.yaml").read_text())
        engine = overlay["rollouts"]["engine"]["init_args"]
        results["one machine"] = compare("one machine", engine, setting)


if __name__ == "__main__":
    main()
