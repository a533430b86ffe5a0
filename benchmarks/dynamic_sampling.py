"""Does dynamic sampling learn in fewer steps, and at what cost? Traditional RL of the miniature, off and on.

    python benchmarks/dynamic_sampling.py --seeds 3

Both sides have the same seeds, problems and settings. Accuracy is measured every few steps, with one sampled
answer to each held-out problem. All sampled completions are counted, including those that were dropped.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from lightning.pytorch import Callback
from side_by_side import benchmark_parser, finish, read_options

from rlt_lightning import Trainer
from rlt_lightning.callbacks import Checkpoint, DynamicSampling, RolloutCallback
from rlt_lightning.datamodules import StudentRLData
from rlt_lightning.engines import Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics.losses import GRPOLoss
from rlt_lightning.rewards import CorrectnessReward

PROMPTS = GROUP_SIZE = 8
MAX_ROUNDS = 3


class Curve(Callback):
    """What each step sampled, and the held-out accuracy after some of them."""

    def __init__(self) -> None:
        self.completions = 0
        self.equal: list[float] = []  # part of the trained groups whose rewards are equal
        self.points: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        sampled = module.step_metrics.get("rollout/sampled_problems", PROMPTS)
        self.completions += int(sampled) * GROUP_SIZE
        self.equal.append(float(module.step_metrics["reward/zero_std_frac"]))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        right = float(trainer.callback_metrics["reward/val_correct"])
        point = {"step": trainer.global_step, "completions": self.completions, "accuracy": right}
        self.points.append(point)
        print(point, flush=True)


def run(dynamic: bool, seed: int, steps: int, every: int, held_out: int) -> Curve:
    """Train one side, and return its curve."""
    curve = Curve()
    rollouts = RolloutCallback(
        sampling=Sampling(temperature=0.7, max_completion_length=72),
        dynamic_sampling=DynamicSampling(MAX_ROUNDS) if dynamic else None,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            Path(folder, "run"),
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            val_check_interval=every,
            check_val_every_n_epoch=None,
            callbacks=[rollouts, curve, Checkpoint(every_n_train_steps=steps)],
            enable_progress_bar=False,
        )
        module = RLTModule(
            "miniature",
            student=None,
            group_size=GROUP_SIZE,
            reward=CorrectnessReward(),
            policy_loss=GRPOLoss(kl_coef=0.0),
            optimizer=OptimizerConfig(lr=3e-4),
            micro_batch_tokens=4096,
            seed=seed,
        )
        data = StudentRLData(
            source="chains",
            num_embedded_rows=2048,
            val_source="chains",
            val_rows=held_out,
            val_batch_size=64,
            prompts_per_step=PROMPTS,
            tags="r1",
            student_system_prompt="",
            seed=seed,
        )
        trainer.fit(module, datamodule=data)
    return curve


def reached(curve: Curve, target: float) -> dict[str, float] | None:
    """Return the first point with an accuracy of at least `target`."""
    return next((point for point in curve.points if point["accuracy"] >= target), None)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=2, help="steps between two validations")
    parser.add_argument("--held_out", type=int, default=256, help="held-out problems")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy to reach")
    options = read_options(parser, seeds=1, steps=1, every=1, held_out=8, target=0.1)
    sides: dict[str, list[Curve]] = {"off": [], "on": []}
    for seed in range(options.seeds):
        for name, curves in sides.items():
            print(f"seed {seed}, dynamic sampling {name}", flush=True)
            curves.append(run(name == "on", seed, options.steps, options.every, options.held_out))
    results: dict[str, Any] = {"target": options.target, "max_rounds": MAX_ROUNDS}
    figures: dict[str, float] = {}
    for name, curves in sides.items():
        found = [point for curve in curves if (point := reached(curve, options.target))]
        results[name] = {
            "curves": [curve.points for curve in curves],
            "equal_by_step": [curve.equal for curve in curves],
            "equal_frac": mean(part for curve in curves for part in curve.equal),
            "completions": mean(curve.completions for curve in curves),
            "final_accuracy": mean(curve.points[-1]["accuracy"] for curve in curves),
            "reached": len(found),
        }
        figures |= {f"equal_{name}": results[name]["equal_frac"], f"reached_{name}": len(found)}
        if found:
            results[name]["steps_to_target"] = mean(point["step"] for point in found)
            results[name]["completions_to_target"] = mean(point["completions"] for point in found)
            figures[f"steps_{name}"] = results[name]["steps_to_target"]
            figures[f"completions_{name}"] = results[name]["completions_to_target"]
    finish(options.output, results, **figures)


if __name__ == "__main__":
    main()
