"""bfloat16 and offloading on two processes: near to full precision, resumed and exported exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cases import full, slow
from commands import run_rlt
from compared import STOP, largest_difference, weights
from fits import small_fit
from launchers import STRATEGIES
from ranks import STEPS, run
from safetensors.torch import load_file

HALF = [full("fsdp2_bf16"), full("zero3_bf16")]
CHECKPOINT = f"checkpoints/step={STEPS:06d}.ckpt/weights/model.safetensors"


def masters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / CHECKPOINT)


@pytest.mark.parametrize("strategy", HALF)
def test_half_precision_strays_no_further_from_fp32_than_a_single_process(
    strategy: str, runs: dict[str, Path]
) -> None:
    exact = masters(runs["single"])
    usual = largest_difference(masters(runs["single_bf16"]), exact)
    difference = largest_difference(masters(runs[strategy]), exact)
    assert 1e-4 < difference < 2 * usual  # it did compute in half precision
    ours, single = (json.loads(runs[s].with_suffix(".json").read_text()) for s in (strategy, "single_bf16"))
    for step, reference in zip(ours, single, strict=True):
        assert step["reward/mean"] == pytest.approx(reference["reward/mean"], abs=5e-3)  # nats
        assert step["policy/grad_norm"] == pytest.approx(reference["policy/grad_norm"], rel=0.03)
        assert step["policy/entropy"] == pytest.approx(reference["policy/entropy"], abs=1e-4)


@pytest.mark.parametrize("strategy", HALF)
def test_weights_and_moments_are_kept_in_fp32(strategy: str, runs: dict[str, Path], tiny_model: str) -> None:
    start = load_file(runs[strategy] / "initial.ckpt" / "weights" / "model.safetensors")
    given = load_file(Path(tiny_model) / "model.safetensors")
    assert all(torch.equal(start[name], tensor) for name, tensor in given.items())  # nothing was rounded
    for part in ("weights", "exp_avg", "exp_avg_sq"):
        path = runs[strategy] / CHECKPOINT.replace("/weights/", f"/{part}/")
        tensors = load_file(path)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert any((tensor.bfloat16().float() != tensor).any() for tensor in tensors.values())
    computed = weights(runs[strategy])  # what forwards use, and workers are sent
    if strategy.startswith("zero"):
        assert all(torch.equal(computed[n], t.bfloat16()) for n, t in masters(runs[strategy]).items())


@pytest.mark.full
def test_offloading_changes_nothing(runs: dict[str, Path]) -> None:
    assert largest_difference(weights(runs["zero3_offload"]), weights(runs["zero3"])) < 1e-5


@pytest.mark.parametrize(
    "strategy", [full("fsdp2_bf16"), slow("zero1_bf16"), full("zero3_bf16"), slow("zero3_offload")]
)
def test_a_run_goes_on_as_if_it_had_not_stopped(
    strategy: str, runs: dict[str, Path], tiny_model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[strategy], folder)
    checkpoints = sorted((folder / "checkpoints").iterdir())
    for later in checkpoints[STOP:]:
        shutil.rmtree(later)
    run(tiny_model, folder, strategy, checkpoint=checkpoints[STOP - 1])
    assert largest_difference(masters(folder), masters(runs[strategy])) == 0
    assert largest_difference(weights(folder), weights(runs[strategy])) == 0


@pytest.mark.parametrize("strategy", [slow("zero1_bf16"), full("zero3")])
def test_a_gradient_that_is_not_finite_stops_the_run(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match="NonFiniteError: Every gradient must be finite, but after step 1"
    ):
        run(tiny_model, tmp_path / "run", strategy, spoil=True)


@pytest.mark.parametrize("strategy", [full("fsdp2"), slow("zero3")])
def test_what_is_exported_are_the_fp32_weights(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    words = [*STRATEGIES[strategy], "--trainer.devices=2", "--trainer.max_steps=2", "--data.val_rows=2"]
    words += ["--trainer.precision=bf16-mixed", "--model.student_dtype=bfloat16"]
    words += ["--rollouts.sampling.max_completion_length=8"]
    run_rlt(*small_fit(tiny_model, tmp_path / "run", *words))
    [checkpoint] = (tmp_path / "run" / "checkpoints").iterdir()
    kept = load_file(checkpoint / "weights" / "model.safetensors")
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    assert largest_difference(exported, kept) == 0
