"""What a validator refuses, at the validator: one table, for one line of a message costs a command a second.

`test_cli.py` has one case for each place that refuses, through a command.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_lightning import Trainer
from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.callbacks.rollout_checks import require_trainable
from rlt_lightning.datamodules import TeacherRLData
from rlt_lightning.engines import HFEngine, Launch, NoPush, Sampling, VLLMEngine
from rlt_lightning.models.lora import LoRA
from rlt_lightning.models.packed import HeadOptions
from rlt_lightning.modules import RLTModule, SFTModule
from rlt_lightning.modules.base import count_steps
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics import TruncatedImportanceSampling
from rlt_lightning.run.folder import choose_run_folder
from rlt_lightning.types import InputError


def module(**options: Any) -> RLTModule:
    return RLTModule("miniature", "miniature", **{"group_size": 2} | options)


def train(sampling: Sampling = Sampling(), asynchronous: bool = False, **options: Any) -> None:  # noqa: B008
    require_trainable(sampling, HFEngine(), asynchronous, module(**options))


def launch(**options: Any) -> Any:
    return Launch(executable="/no/such/vllm", **options).build_command(0, 8000, "model", "gloo", "name")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a group of one": (lambda: module(group_size=1), "model.group_size must be at least 2, but got 1"),
    "a micro-batch of nothing": (
        lambda: module(micro_batch_tokens=0),
        "model.micro_batch_tokens must be at least 1, but is 0",
    ),
    "a micro-batch of nothing, SFT": (
        lambda: SFTModule("miniature", micro_batch_tokens=-1),
        "model.micro_batch_tokens must be at least 1, but is -1",
    ),
    "a head without memory": (
        lambda: module(head=HeadOptions(logits_mib=0)),
        "model.head.logits_mib must be at least 1, but is 0",
    ),
    "a second batch size": (
        lambda: Trainer("unused", accumulate_grad_batches=4),
        "accumulate_grad_batches must be 1, but is 4",
    ),
    "gradients that the trainer clips": (
        lambda: Trainer("unused", gradient_clip_val=1.0),
        "optimizer.max_grad_norm instead",
    ),
    "a run without a length": (lambda: count_steps(4, -1, None, None), "trainer.max_time ends it early"),
    "greedy sampling": (
        lambda: train(Sampling(temperature=0)),
        "rollouts.sampling.temperature must be above 0 in training, but is 0",
    ),
    "stale completions that are not allowed": (
        lambda: train(asynchronous=True, max_staleness=0),
        "model.max_staleness is 0. Set it to 1",
    ),
    "ratios of a truncated distribution": (
        lambda: train(Sampling(top_p=0.9), importance_sampling=TruncatedImportanceSampling()),
        "a truncated distribution is not the policy's",
    ),
    "overlap in process": (
        lambda: RolloutCallback(asynchronous=True),
        "rollouts.asynchronous needs an engine outside this process",
    ),
    "overlap with workers that take turns": (
        lambda: RolloutCallback(VLLMEngine(["http://127.0.0.1:9"], sleep=True), asynchronous=True),
        "the engine's sleep has them do one or the other",
    ),
    "a negative temperature": (
        lambda: Sampling(temperature=-0.5),
        "Sampling must satisfy temperature >= 0, but temperature is -0.5. Correct the sampling section",
    ),
    "two settings of the optimizer": (
        lambda: OptimizerConfig(lr=-1, max_grad_norm=-2),
        "have lr > 0 and max_grad_norm >= 0, but lr is -1, max_grad_norm is -2. Correct model.optimizer",
    ),
    "an adapter of no rank": (lambda: LoRA(rank=0), "model.lora needs rank >= 1, but rank is 0. Correct it"),
    "a run of no step": (
        lambda: count_steps(4, 0, None, 1.0),
        "at least one step, but trainer.max_steps is 0, max_epochs None",
    ),
    "no trace": (lambda: RolloutCallback(num_traces=0), "rollouts.num_traces must be at least 1"),
    "greedy traces": (
        lambda: RolloutCallback(sampling=Sampling(temperature=0), num_traces=2),
        "at temperature 0 exactly these, but are 2 and 0",
    ),
    "an engine without workers": (lambda: VLLMEngine(), "needs either urls or launch, but got urls=None"),
    "an engine with both": (
        lambda: VLLMEngine(["http://127.0.0.1:9"], Launch()),
        "needs either urls or launch, but got urls=",
    ),
    "sleep of servers that are not pushed": (
        lambda: VLLMEngine(["http://127.0.0.1:9"], push=NoPush(), sleep=True),
        "needs workers that are pushed weights, but its push is NoPush",
    ),
    "no vLLM to launch": (launch, "launch.executable must be vLLM's command, but '/no/such/vllm' is none"),
    "a checkpoint that is missing": (
        lambda: choose_run_folder("fit", "runs/x", ckpt_path="/no/such.ckpt"),
        "must be last, best or a checkpoint that exists, but is /no/such.ckpt",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_work_is_refused_by_its_name(case: str) -> None:
    refused, message = REFUSED[case]
    with pytest.raises(InputError) as raised:
        refused()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ('{"question": "1 + 1?", "answer": "2"}', {}, "lacks solution"),
        ('{"question": "1 + 1?"', {}, "broken_json"),
        ('{"question": 5, "solution": "2"}', {}, "wrong_type"),
        ('{"question": "1 + 1?", "solution": "2"}', {"max_prompt_length": 8}, "prompt_too_long"),
        ('{"question": "1 + 1?", "solution": "2"}', {"prompts_per_step": 9}, "prompts_per_step"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(
    row: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(f"{row}\n" * 3)
    data = TeacherRLData(str(source), tokenizer="miniature", **{"prompts_per_step": 1} | options)
    with pytest.raises(InputError) as raised:
        data.setup("fit")
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="accelerator may be gpu only where PyTorch sees a GPU, but PyTorch"):
        Trainer("unused", accelerator="gpu")
