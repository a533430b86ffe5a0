"""One seeded run under every strategy: equal weights and checkpoints; exact resumes, also by another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import ranks
import torch
from cases import full, slow
from commands import run_rlt
from compared import STOP, gather_whole, largest_difference, weights
from fits import metrics
from fits import weights as exported
from launchers import STRATEGIES
from lightning.pytorch import Callback, Trainer
from miniatures import PIECES
from ranks import STEPS, Runs, run
from rows_of import read
from safetensors.torch import load_file, save_file
from sharded import join_ranks
from tiny import CHAINS
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainers import bare_trainer

from rlt_lightning.datamodules import StudentSFTData
from rlt_lightning.models.weights import stored_once
from rlt_lightning.modules import SFTModule
from rlt_lightning.strategies import FSDP2
from rlt_lightning.strategies.fsdp2 import measure_free_bytes, whole_gradients_fit
from rlt_lightning.strategies.sharding import DeepSpeedZeRO
from rlt_lightning.strategies.zero import DeepSpeed

SHARDED = ["ddp", "fsdp2", full("zero1"), full("zero2"), "zero3"]
MEASURED = ("reward/mean", "reward/val_mean", "student/kl_mean", "policy/entropy", "policy/grad_norm")


@pytest.mark.parametrize("strategy", SHARDED)
def test_every_strategy_trains_the_same_weights(strategy: str, runs: dict[str, Path]) -> None:
    assert largest_difference(weights(runs[strategy]), weights(runs["single"])) < 1e-5
    ours, single = (json.loads(runs[s].with_suffix(".json").read_text()) for s in (strategy, "single"))
    assert len(ours) == STEPS
    for step, reference in zip(ours, single, strict=True):
        for name in ("reward/mean", "policy/entropy", "student/kl_mean"):
            assert step[name] == pytest.approx(reference[name], rel=1e-5, abs=1e-6), name  # KL is near 0
        # A CPU's float32 norm of 524,288 numbers errs by 2e-5 of itself, and by half of that in two shards.
        assert step["policy/grad_norm"] == pytest.approx(reference["policy/grad_norm"], rel=3e-5)
        assert step["policy/loss"] == pytest.approx(reference["policy/loss"], abs=1e-5)  # near 0 by nature


@pytest.mark.parametrize("strategy", ["single", full("zero3")])
def test_accumulation_does_not_change_the_result(
    strategy: str, runs: dict[str, Path], tiny_model: str, tmp_path: Path
) -> None:
    run(tiny_model, tmp_path / "run", strategy, tokens=280)  # tokens per micro-batch: four of them or more
    assert largest_difference(weights(tmp_path / "run"), weights(runs["single"])) < 1e-5


@pytest.fixture(scope="module")
def uneven_single(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven") / "run"
    run(tiny_model, folder, "single", tokens=280, uneven=True)
    return folder


@pytest.mark.parametrize("strategy", ["ddp", full("fsdp2"), full("zero3")])
def test_ranks_divide_a_step_by_its_tokens_which_does_not_change_the_result(
    strategy: str, uneven_single: Path, tiny_model: str, tmp_path: Path
) -> None:
    # The completions of rank 1's problem are ten times as long as those of rank 0's.
    folder = tmp_path / "run"
    run(tiny_model, folder, strategy, tokens=280, uneven=True)
    counts = [json.loads(folder.with_suffix(f".rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(rows) for rows in counts] == [STEPS, STEPS]
    assert all(abs(a - b) <= 1 and min(a, b) >= 2 for a, b in zip(*counts, strict=True))
    steps = json.loads(folder.with_suffix(".json").read_text())
    assert all(1 <= step["perf/rank_imbalance"] <= 1.05 for step in steps)
    assert largest_difference(weights(folder), weights(uneven_single)) < 1e-5
    of_one_process = json.loads(uneven_single.with_suffix(".json").read_text())
    for step, reference in zip(steps, of_one_process, strict=True):
        for name in ("reward/std", "rollout/length_max"):  # of the step, no mean over ranks
            assert step[name] == pytest.approx(reference[name], rel=1e-4), name


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero3"])
def test_scoring_while_others_are_sampled_does_not_change_the_result(
    strategy: str, uneven_single: Path, tiny_model: str, tmp_path: Path
) -> None:
    # The last completion of a step comes when others are scored; then one rank has nothing new to score.
    folder = tmp_path / "run"
    run(tiny_model, folder, strategy, tokens=100, uneven=True, early=True)
    assert largest_difference(weights(folder), weights(uneven_single)) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_student_of_other_tokens_scores_alike(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    options = {"student": "miniature", "steps": 2, "tokens": 100, "early": True, "uneven": True}
    run(tiny_model, tmp_path / "one", "single", **options)
    run(tiny_model, tmp_path / "two", strategy, **options)
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "two")) < 1e-5


@pytest.mark.parametrize("strategy", [full("fsdp2"), slow("zero3")])
def test_four_ranks_train_as_two_and_one(strategy: str, tiny_model: str, tmp_path: Path) -> None:
    options = {"tokens": 280, "uneven": True, "prompts": 4, "steps": 3}
    run(tiny_model, tmp_path / "single", "single", **options)
    for world_size in (2, 4):
        folder = tmp_path / f"run{world_size}"
        run(tiny_model, folder, strategy, world_size=world_size, **options)
        assert largest_difference(weights(folder), weights(tmp_path / "single")) < 1e-5
        ours, single = (
            json.loads(path.with_suffix(".json").read_text()) for path in (folder, tmp_path / "single")
        )
        for step, reference in zip(ours, single, strict=True):
            for name in ("reward/mean", "reward/group_std", "student/kl_mean", "policy/entropy"):
                assert step[name] == pytest.approx(reference[name], rel=1e-5, abs=1e-6), name
            assert 1 <= step["perf/rank_imbalance"] <= 1.1  # four ranks have four completions each


@pytest.fixture(scope="module")
def repeated(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs whose iterations take four optimizer steps each, on uneven shards."""
    folder = tmp_path_factory.mktemp("repeated")
    return Runs(tiny_model, folder, updates=2, epochs=2, tokens=280, uneven=True, prompts=4, steps=3)


@pytest.mark.parametrize("strategy", [full("ddp"), "fsdp2", full("zero3")])
def test_several_updates_on_two_ranks_equal_those_of_one_process(strategy: str, repeated: Runs) -> None:
    assert largest_difference(weights(repeated[strategy]), weights(repeated["single"])) < 1e-6
    ours, single = (json.loads(repeated[s].with_suffix(".json").read_text()) for s in (strategy, "single"))
    for step, reference in zip(ours, single, strict=True):
        for name in ("policy/loss", "reward/mean", "policy/ratio_mean", "policy/kl_ref"):
            assert step[name] == pytest.approx(reference[name], rel=1e-6, abs=1e-6), name
        assert abs(step["policy/ratio_mean"] - 1) > 1e-6  # to the policy at the start of the iteration


@pytest.mark.parametrize("strategy", ["fsdp2", full("zero3")])
def test_a_run_of_several_updates_resumes_exactly(
    strategy: str, repeated: Runs, tiny_model: str, tmp_path: Path
) -> None:
    checkpoint = repeated[strategy] / "checkpoints" / "step=000001.ckpt"
    run(tiny_model, tmp_path / "run", strategy, checkpoint=checkpoint, **repeated.options)
    assert largest_difference(weights(tmp_path / "run"), weights(repeated[strategy])) == 0
    after, uninterrupted = (
        json.loads(path.with_suffix(".json").read_text()) for path in (tmp_path / "run", repeated[strategy])
    )
    for step, reference in zip(after, uninterrupted[1:], strict=True):
        assert step["policy/loss"] == reference["policy/loss"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(full(s, s) for s in ("single", "fsdp2", "zero1")),
        ("zero3", "zero3"),
        *(full("zero3", "single"), full("single", "zero3"), full("fsdp2", "ddp"), full("zero1", "fsdp2")),
    ],
)
def test_a_run_goes_on_from_any_checkpoint_under_any_strategy(
    before: str, after: str, runs: dict[str, Path], tiny_model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs[before], folder)
    checkpoints = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == [f"step={n:06d}.ckpt" for n in range(1, STEPS + 1)]
    for later in checkpoints[STOP:]:
        shutil.rmtree(later)
    run(tiny_model, folder, after, checkpoint=checkpoints[STOP - 1])
    difference = largest_difference(weights(folder), weights(runs[before]))
    assert difference == 0 if before == after else difference < 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_checkpoints_are_the_same_whatever_wrote_them(strategy: str, runs: dict[str, Path]) -> None:
    ours, theirs = (runs[s] / "checkpoints" / f"step={STOP:06d}.ckpt" for s in (strategy, "single"))
    names = ["exp_avg", "exp_avg_sq", "rank0.xxh128", "state.pt", "weights"]
    assert sorted(p.name for p in ours.iterdir()) == names
    for part in ("weights", "exp_avg", "exp_avg_sq"):
        tensors = (load_file(folder / part / "model.safetensors") for folder in (ours, theirs))
        assert largest_difference(*tensors) < 1e-4
    state = torch.load(ours / "state.pt", weights_only=True)
    assert state["global_step"] == STOP
    assert state["aliases"] == {"entry.model.lm_head.weight": "entry.model.model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("strategy", "student"),
    [
        ("fsdp2", "miniature"),
        slow("zero3", "miniature"),
        full("zero3", PIECES),  # with another tokenizer, and r_KL on spans
        *(slow(strategy, PIECES) for strategy in ("ddp", "fsdp2")),
    ],
)
def test_several_processes_sample_validate_and_export_like_one(
    strategy: str, student: str, miniature: str, tmp_path: Path
) -> None:
    command = ["fit", "--config=tests/rlt.yaml", *CHAINS, f"--model.teacher={miniature}"]
    command += [f"--model.student={student}", "--trainer.max_steps=2", "--trainer.val_check_interval=1"]
    command += ["--data.num_embedded_rows=8", "--data.val_rows=2"]
    command += ["--rollouts.sampling.max_completion_length=16"]
    for folder, options in (("whole", []), ("shards", ["--trainer.devices=2", *STRATEGIES[strategy]])):
        run_rlt(*command, f"--output_dir={tmp_path / folder}", *options)
    shards, whole = tmp_path / "shards", tmp_path / "whole"
    assert largest_difference(exported(shards), exported(whole)) < 1e-5
    texts = [sorted(row["explanation"] for row in read(run / "rollouts.jsonl")) for run in (shards, whole)]
    assert texts[0] == texts[1]
    for ours, theirs in zip(metrics(shards).values(), metrics(whole).values(), strict=True):
        for name in MEASURED:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name


EVERY: dict[str, Any] = {"every": True, "last": False, "auto": "auto"}  # reduce_every_micro_batch


class Reductions(TorchDispatchMode):
    """Counts reductions of more than a thousand numbers, and the bytes that go into them."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::") and "reduce" in name:
            # Of those with separate outputs and inputs, the inputs come second.
            inputs = args[1] if name.endswith("_base_") else args[0]
            tensors = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)]
            if sum(x.numel() for x in tensors) > 1000:
                self.number += 1
                self.bytes += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


class Watch(Callback):
    """Counts the micro-batches and reductions of the second step."""

    def __init__(self) -> None:
        self.reductions = Reductions()
        self.micro_batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            enter = pl_module.sharding.micro_batch

            def count(last: bool) -> Any:
                self.micro_batches += 1
                return enter(last=last)

            pl_module.sharding.micro_batch = count
            self.reductions.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.reductions.__exit__(None, None, None)


def train(setting: Any, model: str, folder: str) -> tuple[dict[str, int], Any]:
    """Train two steps with a setting of FSDP2; return what the second counted, and the module."""
    watch, strategy = Watch(), FSDP2(reduce_every_micro_batch=setting)
    trainer = bare_trainer(Path(folder), watch, steps=2, devices=2, strategy=strategy)
    module = SFTModule(model, micro_batch_tokens=100)
    options = {"num_embedded_rows": 16, "prompts_per_step": 8, "tags": "r1", "student_system_prompt": ""}
    data = StudentSFTData(source="chains", tokenizer=model, output_dir=folder, **options)
    trainer.fit(module, datamodule=data)
    counted = {"micro_batches": watch.micro_batches, "reductions": watch.reductions.number}
    return counted | {"reduced_bytes": watch.reductions.bytes}, module


def train_and_count(rank: int, model: str, output: str, *sides: str) -> None:
    """Train by FSDP2; rank 0 writes what a step counted, and the weights."""
    for side in sides:
        counted, module = train(EVERY[side], model, output)
        whole = gather_whole(stored_once(module.policy).items())
        if rank == 0:
            save_file(whole, f"{output}/{side}.safetensors")
            Path(f"{output}/{side}.json").write_text(json.dumps(counted))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("rlt_lightning.strategies.sharding.measure_free_bytes", lambda *_: 0.0)
        counted, _ = train("auto", model, output)
    Path(f"{output}/full{rank}.json").write_text(json.dumps(counted))


def test_fsdp2_adds_up_gradients_once_per_update_or_in_every_micro_batch(
    miniature: str, tmp_path: Path
) -> None:
    sides = tuple(EVERY)
    ranks.call(train_and_count, tmp_path, miniature, str(tmp_path), *sides)
    every, last, auto = (json.loads((tmp_path / f"{side}.json").read_text()) for side in sides)
    groups = 4  # three blocks, and what is outside of them
    assert every["micro_batches"] == last["micro_batches"] >= 4
    assert every["reductions"] == groups * every["micro_batches"]
    assert last["reductions"] == auto["reductions"] == groups  # the miniature's gradients fit
    assert every["reduced_bytes"] == every["micro_batches"] * last["reduced_bytes"]
    for rank in (0, 1):  # rank 1 has no memory left: so both reduce every time
        full = json.loads((tmp_path / f"full{rank}.json").read_text())
        assert full["reductions"] == every["reductions"]
    expected = load_file(tmp_path / "every.safetensors")
    for side in sides[1:]:
        assert largest_difference(load_file(tmp_path / f"{side}.safetensors"), expected) < 1e-6


def test_whole_gradients_may_take_a_quarter_of_free_memory() -> None:
    assert whole_gradients_fit(25, 100)
    assert not whole_gradients_fit(26, 100)
    per_process = [measure_free_bytes(torch.device("cpu"), number) for number in (1, 4)]
    assert per_process[0] == 4 * per_process[1] > 2**30


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fsdp2", FSDP2), ("deepspeed_stage_3", DeepSpeed), ("deepspeed_stage_3_offload", DeepSpeed)],
)
def test_lightnings_trainer_takes_our_strategies_by_name(name: str, kind: type) -> None:
    strategy = lightning.pytorch.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is kind
    if isinstance(strategy, DeepSpeed):
        assert isinstance(strategy.config, dict)
        assert strategy.config["zero_optimization"]["stage"] == 3
        assert ("offload_param" in strategy.config["zero_optimization"]) == name.endswith("_offload")


class Twice(nn.Module):
    """Uses its first layer twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(self.first(x).tanh()).tanh())


def step_deepspeed(rank: int, stage: int) -> None:
    """Require what two micro-batches, with two forwards each, move weights by to be their gradient."""
    import deepspeed

    join_ranks(rank, "zero")
    x = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()  # ranks, micro-batches

    def loss(model: Any, x: Tensor) -> Tensor:
        return (model(x) + model(x / 2)).float().square().mean()

    plain = Twice().float()
    (sum(loss(plain, x[i, j].float()) for i in range(2) for j in range(2)) / 4).backward()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = Twice()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine: Any = deepspeed.initialize(model=model, optimizer=sgd, config=config)[0]

    def read() -> list[Tensor]:
        return [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in model.parameters()]

    before = read()
    for j in range(2):
        with DeepSpeedZeRO(SimpleNamespace(model=engine)).micro_batch(last=j == 1):
            engine.backward(loss(engine, x[rank, j]) / 2)
    engine.step()
    for parameter, old, new in zip(plain.parameters(), before, read(), strict=True):
        assert parameter.grad is not None
        assert (old - new - parameter.grad).norm() < 0.02 * parameter.grad.norm()


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_submodule_that_is_used_several_times_has_its_whole_gradient(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    ranks.call(step_deepspeed, tmp_path, stage)
