"""Memory, time and learning: a base in 4 bits against a full one, AdamW's moments in 8 bits against fp32.

    .venv/bin/python benchmarks/quantised.py [--model miniature] [--steps 60] [--seeds 3]

Each pair of runs sees the same rows in the same order; `loss` is the mean of a run's last quarter. `kl`, in
nats per token, says how far the base in 4 bits is from the original model, and how far the base with its
trained adapter is from the original model with the same adapter.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from side_by_side import bars, benchmark_parser, finish, read_options
from torch import Tensor

from rlt_lightning.datamodules import TeacherSFTData
from rlt_lightning.models.load import load_model
from rlt_lightning.models.lora import LoRA, merge_weights
from rlt_lightning.models.quantised import quantised_layers
from rlt_lightning.models.weights import stored_once, whole_tensors
from rlt_lightning.modules import SFTModule
from rlt_lightning.modules.optimizer import OptimizerConfig

STATES_GOAL, BASE_GOAL, LOSS_GOAL = 0.27, 0.2, 1.05


class Keep(Callback):
    """Keeps losses, the seconds of each step, and bytes of weights and of optimizer states."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.losses.append(float(pl_module.step_metrics["policy/loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.policy = pl_module.policy
        states = trainer.optimizers[0].state.values()
        # All parameters share the two tables of codes, qmap1 and qmap2.
        tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        self.state_bytes = storage_bytes(tensors)
        self.layer_bytes = layer_bytes(self.policy)


def storage_bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def layer_bytes(policy: Any) -> int:
    """The bytes of the adapted layers' own weights, with scales and tables."""
    tensors = [p for name, p in policy.named_parameters() if ".base_layer.weight" in name]
    for _, layer in quantised_layers(policy):
        state = layer.quant_state
        tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return storage_bytes(tensors)


def fit(model: str, steps: int, seed: int, lora: LoRA | None, states: Any) -> Keep:
    keep = Keep()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            default_root_dir=folder,
            max_steps=steps,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[keep],
        )
        lr = 1e-3 if lora else 3e-4
        module = SFTModule(model, OptimizerConfig(lr=lr, states=states), lora=lora, seed=seed)
        data = TeacherSFTData(
            source="chains",
            num_embedded_rows=256,
            prompts_per_step=8,
            tokenizer=model,
            seed=seed,
            output_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    return keep


def summary(runs: list[Keep]) -> dict[str, Any]:
    losses = [statistics.fmean(run.losses[-max(1, len(run.losses) // 4) :]) for run in runs]
    return {
        "first_loss": statistics.fmean(run.losses[0] for run in runs),
        "loss": statistics.fmean(losses),
        "losses": losses,
        "step_seconds": statistics.median(s for run in runs for s in run.seconds[2:] or run.seconds),
        "state_bytes": runs[-1].state_bytes,
        "layer_bytes": runs[-1].layer_bytes,
    }


def log_probs(model: Any) -> Tensor:
    ids = torch.randint(
        100, min(2000, model.config.vocab_size), (4, 64), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        return model.eval()(ids.to(model.device)).logits.float().log_softmax(-1)


def kl(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean())


def divergences(model: str, trained: Any) -> dict[str, float]:
    """The mean KL per token, in nats: what 4 bits change, and what the merge into the original changes."""
    plain = load_model(model).to(trained.device)
    original = log_probs(plain)
    merged = {}
    for name, tensor in merge_weights(trained, stored_once(trained)):
        with whole_tensors([tensor]) as [whole]:
            merged[name] = whole.clone()
    ours = log_probs(trained)
    base = stored_once(plain)
    layers = dict(quantised_layers(trained))
    with torch.no_grad():
        from bitsandbytes.functional import dequantize_4bit

        for name, layer in layers.items():
            key = name.replace(".base_layer", "") + ".weight"
            quantised = dequantize_4bit(layer.weight.data, layer.quant_state)
            # original + adapter: what rlt export writes.
            base[key].add_(merged[key] - quantised)
    exported = log_probs(plain)
    with torch.no_grad():
        for name, layer in layers.items():
            base[name.replace(".base_layer", "") + ".weight"].copy_(
                dequantize_4bit(layer.weight.data, layer.quant_state)
            )
    return {
        "original_to_4bit": kl(original, log_probs(plain)),
        "trained_to_exported": kl(ours, exported),
        "original_to_trained": kl(original, ours),
    }


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=None)
    parser.add_argument("--model", default="miniature")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    options = read_options(parser, steps=2, seeds=1)
    lora, in_4_bits = LoRA(rank=8, alpha=16.0), LoRA(rank=8, alpha=16.0, base="4bit")
    sides: dict[str, tuple[LoRA | None, str]] = {
        "all weights, fp32 states": (None, "full"),
        "all weights, 8-bit states": (None, "8bit"),
        "LoRA, full base": (lora, "full"),
        "LoRA, 4-bit base": (in_4_bits, "full"),
    }
    runs: dict[str, list[Keep]] = {name: [] for name in sides}
    for seed in range(options.seeds):
        for name, (adapter, states) in sides.items():
            runs[name].append(fit(options.model, options.steps, seed, adapter, states))
            print(f"seed {seed}: {name}: last loss {runs[name][-1].losses[-1]:.4f}", flush=True)
    results = {name: summary(found) for name, found in runs.items()}
    changed = divergences(options.model, runs["LoRA, 4-bit base"][-1].policy)
    full, small, plain, quantised = (results[name] for name in sides)
    ratios = {
        "state_bytes": small["state_bytes"] / full["state_bytes"],
        "state_loss": small["loss"] / full["loss"],
        "state_step_time": small["step_seconds"] / full["step_seconds"],
        "base_bytes": quantised["layer_bytes"] / plain["layer_bytes"],
        "base_loss": quantised["loss"] / plain["loss"],
        "base_step_time": quantised["step_seconds"] / plain["step_seconds"],
    }
    for name, goal in (("state", STATES_GOAL), ("base", BASE_GOAL)):
        size, loss, seconds = (ratios[f"{name}_{key}"] for key in ("bytes", "loss", "step_time"))
        print(f"quantised_{name}_bytes ratio={size:.3f} goal={goal}")
        print(f"quantised_{name}_loss ratio={loss:.3f} goal={LOSS_GOAL} time={seconds:.2f}")
    print("quantised_kl " + " ".join(f"{name}={value:.4f}" for name, value in changed.items()))
    losses = {name: result["loss"] for name, result in results.items()}
    title = f"SFT of {options.model}, {options.steps} steps"
    finish(
        options.output,
        {"ratios": ratios, "kl": changed, **results},
        lambda: bars(options.output, title, {"loss": losses}),
        states=ratios["state_bytes"],
        states_goal=STATES_GOAL,
        base=ratios["base_bytes"],
        base_goal=BASE_GOAL,
    )


if __name__ == "__main__":
    main()
