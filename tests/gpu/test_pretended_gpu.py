"""Runs on pretended GPUs (tests/support/pretended_gpu/README.md), and the faults that these find."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from cases import full
from commands import ROOT, run_python, run_rlt
from fits import metrics
from launchers import STRATEGIES
from pretended_gpu.faults import plant_on_ranks
from rows_of import read
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("pretended_gpus")

OPTIONS = [
    *("fit", "--config=tests/rlt.yaml", "--trainer.accelerator=gpu", "--trainer.devices=1"),
    *("--trainer.precision=bf16-mixed", "--model.lora.rank=4", "--model.lora.targets=[q_proj]"),
    *("--model.offload_frozen=true", "--model.gradient_checkpointing=true", "--model.head.compiled=false"),
    *("--data.num_embedded_rows=8", "--data.val_rows=2", "--data.val_batch_size=2"),
    *("--trainer.val_check_interval=1", "--checkpoint.every_n_train_steps=1", "--export.adapter=merged"),
    *("--rollouts.sampling.max_completion_length=8", "--rollouts.engine=HFEngine"),
]


def test_a_run_with_all_of_it_on_one_gpu(tiny_model: str, tmp_path: Path) -> None:
    """LoRA, offloaded models, gradient checkpointing, validation, checkpoints, a resume, a merged model."""
    models = [f"--model.teacher={tiny_model}", f"--model.student={tiny_model}"]
    for steps, more in ((1, []), (2, ["--resume=true"])):
        done = run_rlt(
            *OPTIONS, *models, f"--output_dir={tmp_path}", f"--trainer.max_steps={steps}", *more, gpus=1
        )
    assert "attention by PyTorch's variable-length flash attention" in done.stderr
    assert len(metrics(tmp_path)) == 2
    before, after = (
        load_file(Path(folder) / "model.safetensors") for folder in (tiny_model, tmp_path / "model")
    )
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "q_proj" in name}


# Waits of the host for the device in a step, by function, beside those of sampling. None is per row, per
# micro-batch or per metric.
WAITS = {
    "modules/phases.py:synchronise": 14,  # at either end of seven phases
    "modules/rollout_rows.py:<genexpr>": 8,  # one for each column of rollouts.jsonl
    "modules/ranks.py:raise_together": 2,  # that log-probs are finite: of all passes, and of the update
    "numerics/transfers.py:download": 1,  # recorded tokens
    "callbacks/recorder.py:_build_rows": 1,  # rewards, of which the extremes are recorded with tokens
    "numerics/rewards.py:require_tokens": 1,
    "numerics/finite.py:require_finite": 1,
    "strategies/sharding.py:step": 1,  # the gradient's norm
    "modules/policy.py:optimizer_step_now": 1,
    "numerics/importance.py:read": 1,
    "metrics/figures.py:compute": 1,  # all metrics
}
COUNTED_STEP = [
    *("fit", "--config=configs/laptop/rlt.yaml", "--trainer.accelerator=gpu"),
    *("--trainer.precision=bf16-mixed", "--trainer.max_steps=3", "--data.prompts_per_step=2"),
    *("--data.num_embedded_rows=8", "--model.head.compiled=false", "--model.micro_batch_tokens=200"),
]


# Two ranks wait for these too: what they tell each other, none of it per token, row or metric.
WAITS_OF_TWO = WAITS | {
    "run/ranks.py:gather_from_ranks": 8,  # four for each of two gathers: problems and completions
    "run/ranks.py:gather_rows": 8,
    "modules/ranks.py:reduce": 5,
    "run/interrupt.py:on_any_rank": 2,  # whether a callback of one rank, or a signal to it, stops the run
    "trainer.py:run": 6,  # Lightning's own
}


@pytest.mark.parametrize(("gpus", "group_size"), [(1, 2), full(1, 16), full(2, 16)])
def test_the_host_waits_once_per_token_and_never_per_row(gpus: int, group_size: int, tmp_path: Path) -> None:
    options = ["--trainer.callbacks+=pretended_gpu.waits.WaitsOfSteps", f"--model.group_size={group_size}"]
    options += [f"--trainer.devices={gpus}", *(["--trainer.strategy=ddp"] if gpus > 1 else [])]
    run_rlt(*COUNTED_STEP, *options, f"--output_dir={tmp_path / 'run'}", gpus=gpus)
    _, found = read(tmp_path / "run" / "waits.jsonl")
    tokens = found.pop("engines/hf.py:draw")  # of the first rank; the metric is of both
    assert tokens == metrics(tmp_path / "run")[2]["rollout/length_max"] or gpus > 1
    assert found == (WAITS if gpus == 1 else WAITS_OF_TWO)


# Two ranks: NCCL's rules hold, so every collective was the same on both ranks (collectives.py)

JOBS: dict[str, dict[str, Any]] = {
    "scored early, uneven": {"early": True, "uneven": True, "tokens": 100},
    "dynamic sampling": {"early": True, "dynamic": 2, "prompts": 4, "rows": 11},
    "another tokenizer": {"student": "miniature", "uneven": True, "tokens": 280},
    "LoRA, merged": {"lora": True, "adapter": "merged"},
    "baseline": {"baseline": "empty"},
    "OPD, uneven": {"opd": {"teacher": "TINY"}, "uneven": True, "tokens": 500},
    "OPD of log-ratios": {"opd": {"teacher": "TINY", "estimator": "sampled"}},
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("job", "strategy"),
    [*product(JOBS, STRATEGIES), *product([next(iter(JOBS))], ("zero1", "zero2", "zero3_offload"))],
)
def test_two_ranks_meet_in_the_same_collectives(
    job: str, strategy: str, tiny_model: str, tmp_path: Path
) -> None:
    options = json.loads(json.dumps(JOBS[job]).replace("TINY", tiny_model))
    ranks.run(tiny_model, tmp_path / "run", f"{strategy}_bf16", gpus=True, steps=2, **options)
    first, second = (
        [line[:2] for line in json.loads((tmp_path / f"run.collectives{rank}").read_text())]
        for rank in (0, 1)
    )
    assert first == second
    kinds = {what.split()[0] for what, _ in first}
    assert kinds >= {"all_reduce", "barrier", "broadcast"}
    assert (strategy in ("fsdp2", "zero3", "zero3_offload")) is ("reduce_scatter_tensor" in kinds)


# By the command line, with the in-process engine and validation.
TWO = ["--trainer.accelerator=gpu", "--trainer.devices=2", "--trainer.precision=bf16-mixed"]
VALIDATED = ["--data.val_rows=2", "--data.val_batch_size=2", "--trainer.val_check_interval=1"]
SMALL = ["--trainer.max_steps=2", "--data.num_embedded_rows=16", "--data.prompts_per_step=2"]
RUNS = {
    "sft": [
        *("--config=configs/laptop/sft.yaml", "--config=configs/add/evaluate_every.yaml"),
        *("--data.source=chains:right", "--trainer.callbacks.init_args.every_n_steps=1"),
        "--trainer.callbacks.init_args.max_rows=3",
    ],
    "rlt": [
        *("--config=configs/laptop/rlt.yaml", "--model.group_size=4", "--model.head.compiled=false"),
        "--rollouts.dynamic_sampling.max_rounds=1",
    ],
    "opd": ["--config=configs/laptop/opd.yaml", "--model.group_size=1"],  # an answer for each rank
}


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_sample_validate_and_evaluate(run: str, strategy: str, tmp_path: Path) -> None:
    run_rlt(
        "fit", *RUNS[run], *STRATEGIES[strategy], *TWO, *SMALL, *VALIDATED, f"--output_dir={tmp_path}", gpus=2
    )
    names = {name for row in metrics(tmp_path).values() for name in row}
    assert any("val_" in name for name in names)
    assert any(name.startswith("eval/") for name in names) is (run == "sft")


# What it finds


def test_faults_of_one_process_are_found() -> None:
    code = "from pretended_gpu.faults import ON_ONE_RANK, require_found; [*map(require_found, ON_ONE_RANK)]"
    run_python(code, ROOT, gpus=1)


@pytest.mark.parametrize("fault", ["call on one rank", full("tensor of the CPU")])
def test_a_fault_of_two_ranks_is_found(fault: str, tmp_path: Path) -> None:
    two = ranks.Ranks(2, gpus=True)  # their next collectives would differ as well
    try:
        two.run(ranks.job(plant_on_ranks, tmp_path, fault))
    finally:
        two.stop()


COUNTED = """
from collections import Counter
from pretended_gpu.device import set_on_wait
import torch
x, found = torch.arange(4.0, device="cuda"), Counter()
set_on_wait(lambda kind: found.update([kind]))
x.sum() * 2 + x[1]                                   # none
pinned = torch.empty(4, pin_memory=True)
x.copy_(pinned, non_blocking=True)                   # none
x.sum().item()
torch.tensor([1, 2], device="cuda")
x.cpu()
x.nonzero()
torch.cuda.synchronize()
set_on_wait(None)
assert found == {"item": 1, "to device": 1, "to host": 1, "nonzero": 1, "torch.cuda.synchronize": 1}, found
"""


def test_waits_for_the_device_are_counted() -> None:
    run_python(COUNTED, ROOT, gpus=1)


SHARED = """
import torch
from fake_worker import FakeWorker
from rlt_lightning.engines import IPCPush
from rlt_lightning.engines.client import WorkerClient
from rlt_lightning.worker.ipc import TensorReader, open_buffer

gpu, buffers, arrived, freed = torch.device("cuda:0"), [], {}, []
torch.cuda.ipc_collect = lambda: freed.append(all(w.version == "1" for w in workers))

class OnTheGPU(FakeWorker):
    def answer(self, path, body):
        named = path == "/collective_rpc" and body["method"] == "name_gpu"
        return {"results": ["pretended"]} if named else super().answer(path, body)

    def update(self, info):
        buffers.append(info["buffer"])
        arrived.update(self.reader.read(open_buffer(info["buffer"], gpu), info["parts"]))

weights = {"a": torch.randn(700, 500, device=gpu), "b": torch.randn(3, device=gpu).bfloat16()}
with OnTheGPU() as worker, OnTheGPU() as other:
    worker.reader, other.reader = TensorReader(gpu), TensorReader(gpu)
    for workers in ([worker], [worker, other]):
        buffers.clear(), arrived.clear()
        IPCPush(bucket_mib=1).push(list(weights.items()), [WorkerClient(w.url) for w in workers], "1")
        assert len(buffers) == 2 * len(workers)  # 1.4 MB
        assert len({buffer["memory"] for buffer in buffers}) == len(workers)  # the same one again
        assert all(tensor.is_cuda and torch.equal(tensor, weights[name]) for name, tensor in arrived.items())
        assert arrived.keys() == weights.keys()
        assert freed.pop() and not freed  # once, when the workers have let go of it
"""


def test_a_gpus_buffer_brings_weights_to_workers_on_it() -> None:
    run_python(SHARED, ROOT, gpus=1)
