"""Options by which any config runs in a test: tiny models, few rows, one step, a CPU or pretended GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from commands import ROOT
from torch import Tensor

from rlt_lightning.run.shipped import find_config, read_launch_line
from rlt_lightning.strategies.sharding import ModelEntry

EXPERIMENTS = ("laptop", "recipe_7b", "own_rows")
CONFIGS = [path for name in EXPERIMENTS for path in sorted((ROOT / "configs" / name).glob("*"))]
OVERLAYS = [path for name in ("hardware", "add") for path in sorted((ROOT / "configs" / name).glob("*"))]

TINY = [
    "--data.source=chains",
    "--data.prompts_per_step=2",
    "--data.num_embedded_rows=4",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.num_nodes=1",
    "--trainer.precision=32-true",
    "--model.micro_batch_tokens=512",
    "--model.head.logits_mib=64",
]
CHAINS = ["--data.source=chains", "--data.teacher_system_prompt=", "--data.student_system_prompt="]
SHORT = ["--model.group_size=2", "--rollouts.sampling.max_completion_length=4"]
QUICKSTART = [
    *("fit", "--config=configs/laptop/rlt.yaml", "--trainer.max_steps=2", "--data.num_embedded_rows=8"),
    *("--data.prompts_per_step=2", "--model.group_size=2", "--rollouts.sampling.max_completion_length=8"),
]
TINY_EVALUATION = [
    "--data.sets={chains: null}",
    "--data.max_rows=2",
    "--rollouts.sampling.max_completion_length=4",
    "--trainer.accelerator=cpu",
]


def generates(settings: dict[str, Any]) -> bool:
    """Whether the config is one of stage 3: it samples where others predict the reward of given traces."""
    return "student_context" in settings["data"].get("init_args", {})


def keeps_right_answers(settings: dict[str, Any]) -> bool:
    """Whether the config is one of rejection sampling."""
    return generates(settings) and settings["data"]["class_path"].endswith("StudentRLData")


def tiny_options(verb: str, settings: dict[str, Any], model: str) -> list[str]:
    """What to append to a verb and the config with these settings.

    Args:
        model: Folder of a tiny model; it takes every part that the config has.
    """
    arguments = settings["model"].get("init_args", {})
    is_sft = settings["model"]["class_path"].endswith("SFTModule")
    if verb == "test":
        return [*TINY_EVALUATION, f"--model.pretrained={model}"]
    if "pretrained" in arguments:
        options = [*TINY, f"--model.pretrained={model}"]
        # A student with teacher_weights is its own teacher.
        of_itself = "teacher_weights" in arguments
        has_teacher = settings["model"]["class_path"].endswith("OPDModule") and not of_itself
        options += [f"--model.teacher={model}"] if has_teacher else []
    else:
        options = [*TINY, f"--model.teacher={model}"]
        options += [f"--model.student={model}"] if arguments.get("student", "") is not None else []
    options += ["--data.max_length=2048"] if is_sft else []
    if verb == "fit":
        options += ["--trainer.max_steps=1", "--data.val_rows=0"]
    if (verb in ("fit", "validate") and not is_sft) or generates(settings):
        options += SHORT
    if keeps_right_answers(settings):
        # The model must be able to answer: random weights are never right.
        options += ["--model.teacher=miniature", "--data.source=chains", "--data.student_system_prompt="]
        options += ["--data.tags=r1", "--data.num_embedded_rows=16"]
        options += ["--rollouts.sampling.max_completion_length=72", "--rollouts.num_traces=2"]
    if "min_reward" in settings.get("distillation", {}):
        # Random weights close no explanation.
        options += ["--distillation.min_reward=null"]
    return options


def name_of(config: Path) -> str:
    """Return what a config is called on a command line."""
    return config.relative_to(ROOT / "configs").with_suffix("").as_posix()


def launch_words(config: Path) -> list[str]:
    """Return the launch line on top of every config: verb, configs and options."""
    program, *words = read_launch_line(config.read_text())
    assert program == "rlt"
    assert name_of(config) in words
    return words


def tiny_run(config: Path, model: str) -> tuple[str, list[str], dict[str, Any]]:
    """Return verb and options that run a config or an overlay at tiny size, and the settings of the config.

    An overlay is put on what its launch line has first, but one of a 7B teacher on the miniature's.
    """
    verb, _, first, *_ = launch_words(config)
    base = find_config("laptop/rlt" if config in OVERLAYS and first == "recipe_7b/rlt" else first)
    settings = yaml.safe_load(base.read_text())
    options = [f"--config={base}", *([] if base == config else [f"--config={config}"])]
    if config.stem == "vllm_async":
        options.insert(1, f"--config={config.with_name('vllm.yaml')}")
    overlay = yaml.safe_load(config.read_text())
    for group in ("model", "data"):  # what teaches, which format
        settings[group].setdefault("init_args", {}).update(overlay.get(group, {}).get("init_args", {}))
    return verb, [*options, *tiny_options(verb, settings, model)], settings


def uses_workers(config: Path) -> bool:
    """Return whether completions of an overlay come from vLLM workers."""
    return config in OVERLAYS and ("VLLMEngine" in config.read_text() or config.stem == "vllm_async")


def written_file(verb: str, settings: dict[str, Any]) -> str:
    """Return the file that a run of the config leaves."""
    if generates(settings):
        return "distillation.jsonl"
    return {"fit": "metrics.csv", "test": "evaluation.json", "predict": "scores.jsonl"}[verb]


class StrictEntry(ModelEntry):
    """An entry that returns only what the hooks of DeepSpeed ZeRO-3 can read."""

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = super().forward(function, *arguments)
        assert result is None or isinstance(result, (Tensor, tuple, list, dict)), type(result)
        return result
