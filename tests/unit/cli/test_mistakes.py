"""Mistakes are refused before a run begins, by the setting's name.

A command takes a second, so these cases call a parser, or the code that refuses, in this process.
test_cli.py has one case for each place that refuses, through a command.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_lightning import (
    EvaluationDataModule,
    OptimizerConfig,
    RLTModule,
    RolloutCallback,
    ScoringData,
    StratosDataModule,
    StudentSFTData,
    TeacherRLData,
    Trainer,
)
from rlt_lightning import __main__ as program
from rlt_lightning.callbacks.evaluation import ResponseCallback
from rlt_lightning.callbacks.predictions import DistillationWriter
from rlt_lightning.callbacks.rollout_checks import require_trainable
from rlt_lightning.checkpoints.run_folder import choose_run_folder
from rlt_lightning.datamodules.evaluation_sets import build_set
from rlt_lightning.engines import GlooPush, Launch, NoPush, Sampling, VLLMEngine
from rlt_lightning.models.load import require_model_name
from rlt_lightning.models.lora import LoRA
from rlt_lightning.models.packed import HeadOptions
from rlt_lightning.modules import OPDModule, SFTModule
from rlt_lightning.modules.checks import count_steps
from rlt_lightning.numerics import TruncatedImportanceSampling
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.run.ranks import join_nodes
from rlt_lightning.types import InputError

CONFIGS = {
    "key.yaml": "model:\n  class_path: rlt_lightning.modules.RLTModule\n  init_args: {group_sise: 4}\n",
    "class.yaml": "model:\n  class_path: rlt_lightning.modules.RTLModule\n",
}
FIT, PLATEAU = "fit --config laptop/rlt", "--lr_scheduler.monitor x"
# What is typed -> what the message names.
MISTAKES = {
    "fitt --config laptop/rlt": ("fitt", "choose from"),
    "fit": ("--config is missing", "try --config laptop/rlt"),
    "configs laptop/rtl": ("laptop/rtl", "rlt configs"),
    "fit --config laptop/rtl": ("laptop/rtl", "config"),
    f"{FIT} --model.group_sise 4": ("group_sise", "not accepted"),
    f"{FIT} --modle.group_size 4": ("modle.group_size", "unrecognized"),
    f"{FIT} --config key.yaml": ("group_sise", "not accepted"),
    f"{FIT} --trainer.max_steps abc": ("trainer.max_steps", "Expected"),
    f"{FIT} --config class.yaml": ("RTLModule", "model"),
    f"{FIT} --model.reward RLTRewrd": ("reward", "RLTRewrd"),
    f"{FIT} --model.dtype fp16": ("dtype", "float16"),
    f"{FIT} --data.tokenizer other": ("data.tokenizer follows from model", "Remove it"),
    "test --config laptop/evaluate --data.num_samples 7": ("data.num_samples", "rollouts"),
    "test --config laptop/evaluate --data.sets.a.split x": ("data.sets.a", "config"),
    f"{FIT} --seed -1": ("seed", "v>=0"),
    "test --config laptop/rlt": ("RLTModule", "model"),
    f"{FIT} --lr_scheduler StepLR --lr_scheduler.step_size 1": ("lr_scheduler must", "Set optimizer"),
    f"{FIT} --optimizer torch.optim.SGD --lr_scheduler ReduceLROnPlateau {PLATEAU}": ("lr_scheduler must",),
    f"{FIT} --optimizer Mouon": ("optimizer", "Mouon"),
    "report": ("run_dir", "required"),
    "export --ckpt_path x": ("output_dir", "required"),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named_before_a_run_begins(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlt", *command.split()])
    with pytest.raises(SystemExit) as ending:
        program.main()
    assert ending.value.code == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert len(before) <= 1  # the verbs, where none is known
    assert line.startswith("rlt: error: ")
    for word in MISTAKES[command]:
        assert word in line
    assert not list(tmp_path.rglob("model*"))


ROWS = [{"question": "1 + 1?", "solution": "2", "reasoning_trace": "1 + 1 is 2."}] * 4
LR = OptimizerConfig(1e-4)
SFT_DATA, GIVEN = StudentSFTData(ROWS), ScoringData(ROWS, prompts_per_step=2)


def train(module: Any = None, data: Any = None, **options: Any) -> None:
    options = {"max_steps": 1, "accelerator": "cpu", "overwrite": True} | options
    Trainer("run", **options).fit(module or make_module(), data or make_data())


def on_cpu() -> Trainer:
    return Trainer("run", accelerator="cpu")


def make_module(**options: Any) -> RLTModule:
    return RLTModule(**{"teacher": "miniature", "student": "miniature", "group_size": 2} | options)


def make_data(source: Any = ROWS, **options: Any) -> StratosDataModule:
    return TeacherRLData(source, prompts_per_step=2, tags="r1", **options)


def hub(source: Any = ROWS, **options: Any) -> None:
    TeacherRLData(source, tokenizer="nobody/nothing", **options).setup("fit")


def evaluate(sets: Any, **options: Any) -> None:
    EvaluationDataModule(sets, tokenizer="nobody/nothing", **options).setup("test")


def launch(**options: Any) -> Any:
    return Launch(executable="/no/such/vllm", **options).build_command(0, 8000, "model", "gloo", "name")


def check(sampling: Sampling = Sampling(), asynchronous: bool = False, **options: Any) -> None:  # noqa: B008
    rollouts = RolloutCallback(VLLMEngine(URLS), sampling, asynchronous=asynchronous)
    require_trainable(rollouts.sampler, make_module(**options))


def build_own(**settings: str) -> None:
    build_set("x", {"source": "f", "template": "{question}"} | settings)


def launched(**environment: str) -> None:
    """Start where a launcher has set these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        train()


# torchrun's, which has started two processes.
TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0"}
URLS = ["http://127.0.0.1:9"]
IS, TRUNCATED = TruncatedImportanceSampling(), Sampling(top_p=0.9)
TURNS = VLLMEngine(URLS, sleep=True)
# What is refused -> the setting, and the word of its remedy if that is another.
REFUSED: dict[str, tuple[Callable[[], object], *tuple[str, ...]]] = {
    "a group of one": (lambda: make_module(group_size=1), "model.group_size", "at least 2"),
    "no micro-batch": (lambda: make_module(micro_batch_tokens=0), "model.micro_batch_tokens", "at least 1"),
    "a head without memory": (lambda: make_module(head=HeadOptions(logits_mib=0)), "model.head.logits_mib"),
    "a run without a length": (lambda: count_steps(4, -1, None, None), "trainer.max_time", "max_steps"),
    "a run of no step": (lambda: count_steps(4, 0, None, 1.0), "trainer.max_steps", "at least one"),
    "greedy sampling": (lambda: check(Sampling(temperature=0)), "rollouts.sampling.temperature", "above 0"),
    "stale": (lambda: check(asynchronous=True, max_staleness=0), "model.max_staleness", "1"),
    "truncated": (lambda: check(TRUNCATED, importance_sampling=IS), "importance_sampling", "truncated"),
    "overlap in process": (lambda: RolloutCallback(asynchronous=True), "rollouts.asynchronous", "engine"),
    "no response": (lambda: ResponseCallback(num_samples=0), "rollouts.num_samples", "at least 1"),
    "no selected trace": (lambda: DistillationWriter(per_problem=0), "distillation.per_problem", "at least"),
    "no trace": (lambda: RolloutCallback(num_traces=0), "rollouts.num_traces", "at least 1"),
    "greedy traces": (lambda: RolloutCallback(None, Sampling(0), num_traces=2), "num_traces", "temperature"),
    "a negative temperature": (lambda: Sampling(temperature=-0.5), "temperature >= 0", "sampling"),
    "two settings": (lambda: OptimizerConfig(lr=-1, max_grad_norm=-2), "lr > 0", "max_grad_norm >= 0"),
    "an adapter of no rank": (lambda: LoRA(rank=0), "model.lora", "rank >= 1"),
    "another machine's address": (GlooPush(host="192.0.2.1").open_store, "GlooPush's host", "192.0.2.1"),
    "an engine without workers": (lambda: VLLMEngine(), "urls", "launch"),
    "an engine with both": (lambda: VLLMEngine(URLS, Launch()), "urls", "launch"),
    "sleep without pushes": (lambda: VLLMEngine(URLS, push=NoPush(), sleep=True), "sleep", "NoPush"),
    "no vLLM to launch": (launch, "launch.executable", "/no/such/vllm"),
    "no checkpoint": (lambda: choose_run_folder("fit", "x", ckpt_path="/no.ckpt"), "/no.ckpt", "--ckpt_path"),
    "nothing to resume": (lambda: choose_run_folder("fit", "new", "", "last"), "--ckpt_path"),
    "no temperature of OPD": (lambda: OPDModule(temperature=0.0), "model.temperature above 0"),
    "a negative one": (lambda: OPDModule(temperature=-1.0), "model.temperature above 0"),
    "right for less": (lambda: CorrectnessReward(0.0, 0.0, -1.0), "right must be above wrong"),
    "unformatted for more": (lambda: CorrectnessReward(1.0, -1.0, -0.5), "right must be above wrong"),
    "right for nothing": (lambda: CorrectnessReward(math.nan, 0.0, 0.0), "right must be above wrong"),
    "turns at once": (lambda: RolloutCallback(TURNS, asynchronous=True), "rollouts.asynchronous", "sleep"),
    "no source": (lambda: TeacherRLData([]), "data.source must name at least one source"),
    "a part of a split": (lambda: make_data(split="train[:10%]"), "data.split", "data.max_rows"),
    "two splits": (lambda: make_data(split="train+test"), "data.split", "data.max_rows"),
    "no question": (lambda: build_own(template="Solve."), "{question}", "'Solve.'"),
    "no options": (lambda: build_own(judge="choice"), "lacks {options}"),
    "a control character": (lambda: build_own(template="\boxed{} {question}"), "no control character"),
    "a public GPQA": (lambda: build_set("gpqa_diamond", {"private": False}), "gpqa_diamond", "private"),
    "a model's typo": (lambda: require_model_name("minature"), "There is no model 'minature'"),
    "no model folder": (lambda: require_model_name("./model"), "./model"),
    # Mistakes in a script.
    "strategy": (lambda: train(strategy="ddp_spawn"), "strategy", "ddp"),
    "Lightning's clipping": (lambda: train(gradient_clip_val=1.0), "model.optimizer.max_grad_norm", "clip"),
    "accumulation": (lambda: train(accumulate_grad_batches=2), "model.micro_batch_tokens", "accumulate"),
    "barebones": (lambda: train(barebones=True), "trainer.barebones", "Remove"),
    "two processes of torchrun": (lambda: launched(**TORCHRUN), "trainer.devices 1", "has started 2"),
    "two pods": (lambda: launched(RANK="0", WORLD_SIZE="2"), "trainer.num_nodes must be 2", "MASTER_ADDR"),
    "two samplers": (lambda: train(callbacks=[RolloutCallback(), RolloutCallback()]), "RolloutCallback"),
    "data of SFT": (lambda: train(data=SFT_DATA), "must be TeacherRLData"),
    "given completions": (lambda: train(data=GIVEN), "ScoringData", "TeacherRLData"),
    "a prediction of SFT": (
        lambda: on_cpu().predict(SFTModule("miniature"), SFT_DATA),
        "SFTModule",
        "rlt test",
    ),
    "a file": (lambda: train(data=make_data("rows.jsonl")), "file or folder 'rows.jsonl' must exist"),
    # Each names the file, and not the model that the hub would be asked for.
    "a file, before the hub": (lambda: hub(source="rows.jsonl"), "'rows.jsonl' must exist"),
    "a set, before the hub": (lambda: evaluate({"math500": None, "mine": "rows.jsonl"}), "'rows.jsonl'"),
    "tags": (lambda: train(data=TeacherRLData(ROWS, tags="qwen")), "stratos or r1"),
    "nothing held out": (lambda: on_cpu().validate(make_module(), make_data()), "val_rows"),
    "a full folder": (lambda: Trainer("full").fit(make_module(), make_data()), "output_dir must be empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    function, *words = REFUSED[case]
    with pytest.raises(InputError) as raised:
        function()
    line = str(raised.value)
    for word in words:
        assert word in line
    assert "\n" not in line
    assert not list(Path("run").glob("model*"))


def test_tasks_without_srun_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="--ntasks-per-node=4"):
        Trainer("run", accelerator="cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun inside the allocation")
    join_nodes(1)
