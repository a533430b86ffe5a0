"""The command to go on with after a run: in its format, on its device, within its models' contexts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from rlt_lightning.datamodules.sources import EMBEDDED
from rlt_lightning.models.embedded import MINIATURES
from rlt_lightning.pretrained import context_length
from rlt_lightning.types import as_list

STUDENT_FORMAT = ("tags", "student_system_prompt")  # the same in all stages
TEACHER_FORMAT = (*STUDENT_FORMAT, "teacher_system_prompt")
ON_A_CPU = {  # configs of the stages: the recipe -> what runs on a laptop
    "teacher_rlt": "quickstart_smollm2",
    "generate": "smollm2_generate",
    "student_sft": "smollm2_student_sft",
    "evaluate": "smollm2_evaluate",
}
IN_MINIATURE = {  # the same for runs with an embedded miniature, on last-digit chains
    "teacher_rlt": "quickstart",
    "generate": "miniature_generate",
    "student_sft": "miniature_student_sft",
    "evaluate": "miniature_evaluate",
}
RECIPE_MODELS = {
    "Qwen/Qwen2.5-7B-Instruct",
    "bespokelabs/Bespoke-Stratos-7B",
}  # the recipe's configs name them
MAX_COMPLETION_LENGTH = "rollouts.sampling.max_completion_length"
Options = dict[str, Any]


def after_fit(config: Namespace, on_cpu: bool, examples: list[Any]) -> str | None:
    """What to do with the trained model, and the command for it.

    Args:
        config: The run's resolved settings.
        on_cpu: Whether it ran on one.
        examples: What it was trained on.
    """
    data, models, model = config.data.init_args, config.model.init_args, f"{config.output_dir}/model"
    if data.task == "teacher_sft":
        path = config_path("teacher_rlt", on_cpu, config)
        options: Options = {"model.teacher": model, **own("model.student", models.pretrained, on_cpu)}
        options |= {"data.source": data.source, **room(config, path, model, examples)}
        words = command("fit", path, options, data, TEACHER_FORMAT)
        return f"train it by its students' reward:\n  {words}"
    if data.task == "rlt":
        path = config_path("generate", on_cpu, config)
        options = {"model.teacher": model, "model.student": models.student, **sampling_of(config)}
        options |= at_most(path, "data.student_context", context_of(config, models.student))
        options |= (new := new_questions(data))
        words = command("predict", path, options, data, TEACHER_FORMAT)
        which = "; FILE: questions that it was not trained on" if new["data.source"] == "FILE" else ""
        return f"write data for students (docs/generating.md{which}):\n  {words}"
    if data.task in ("student_rl", "student_sft"):
        path = config_path("evaluate", on_cpu, config)
        is_rl = data.task == "student_rl"
        sampling = sampling_of(config) if is_rl else room(config, path, model, examples)
        options = {"model.pretrained": model, **sampling}
        return f"evaluate it (docs/evaluation.md):\n  {command('test', path, options, data, STUDENT_FORMAT)}"
    return None


def after_generation(config: Namespace, on_cpu: bool, source: Path) -> str | None:
    """What to do with the traces that were selected; None if there are none.

    Args:
        config: The run's resolved settings.
        on_cpu: Whether it ran on one.
        source: The file of the traces.
    """
    data = config.data.init_args
    path = config_path("student_sft", on_cpu, config)
    num_rows = sum(1 for _ in source.open())
    if not num_rows:
        return None
    student = config.model.init_args.student
    options: Options = {"data.source": str(source), **own("model.pretrained", student, on_cpu)}
    options |= at_most(path, "data.prompts_per_step", num_rows)
    limit = data.student_context or context_of(config, student)
    options |= at_most(path, "data.max_length", limit)
    return f"train a student on them:\n  {command('fit', path, options, data, STUDENT_FORMAT)}"


def command(verb: str, path: str, options: Options, data: Namespace, format_settings: tuple[str, ...]) -> str:
    """A command line with these options, in the format of the data."""
    formats = {f"data.{name}": data.get(name) for name in format_settings}
    unlike = {n: v for n, v in formats.items() if v is not None or setting(path, n) is not None}
    words = (part for name, value in (options | unlike).items() for part in (f"--{name}", word(value)))
    return shlex.join([program(), verb, "--config", path, *words])


def program() -> str:
    """The command that this process was started as."""
    return sys.argv[0] if Path(sys.argv[0]).name == "rlt" else "rlt"


def word(value: Any) -> str:
    """A setting as the command line takes it."""
    if isinstance(value, str):
        return value
    return json.dumps(value.as_dict() if isinstance(value, Namespace) else value)


def config_path(stage: str, on_cpu: bool, config: Namespace) -> str:
    """The config of a stage that fits the device and, on a CPU, this run's models."""
    models = {config.model.init_args.get(name) for name in ("pretrained", "teacher", "student")}
    laptop = IN_MINIATURE if models & MINIATURES.keys() else ON_A_CPU
    return f"configs/{laptop[stage] if on_cpu else stage}.yaml"


def own(option: str, model: str, on_cpu: bool) -> Options:
    """This run's model in place of the proposed config's, unless both are the recipe's."""
    return {} if model in RECIPE_MODELS and not on_cpu else {option: model}


def sampling_of(config: Namespace) -> Options:
    """Completions as this run has sampled them."""
    sampling = config.rollouts.sampling
    length = {MAX_COMPLETION_LENGTH: sampling.max_completion_length}
    return {"rollouts.sampling.temperature": sampling.temperature, **length}


def new_questions(data: Namespace) -> Options:
    """Questions that this run has not seen: an embedded source makes others of another seed."""
    if all(source in EMBEDDED for source in as_list(data.source)):
        # The next seed is that of configs/quickstart_smollm2_warmup.yaml, so the one after it.
        return {"data.source": data.source, "data.seed": data.seed + 2}
    return {"data.source": "FILE"}


def room(config: Namespace, path: str, model: str, examples: list[Any]) -> Options:
    """Completions as long as those that were trained on, if the proposed config's are shorter or too long."""
    longest_prompt = max(example.loss_mask.count(False) for example in examples)
    longest = max(sum(example.loss_mask) for example in examples)
    limit = setting(path, MAX_COMPLETION_LENGTH)
    if limit is not None and longest <= limit <= context_of(config, model) - longest_prompt:
        return {}
    return {MAX_COMPLETION_LENGTH: longest}


def context_of(config: Namespace, model: str) -> int:
    """The context of a model that this run could load, tokens."""
    return context_length(model, config.model.init_args.trust_remote_code)


def at_most(path: str, name: str, limit: int) -> Options:
    """A setting of the proposed config, lowered if it is above a limit; set if the file is not here."""
    value = setting(path, name)
    return {} if value is not None and value <= limit else {name: limit}


def setting(path: str, name: str) -> Any:
    """What a config sets, by the name of its option; None if it does not."""
    value: Any = yaml.safe_load(Path(path).read_text()) if Path(path).exists() else None
    for key in name.split("."):
        value = value and value.get("init_args", value).get(key)
    return value
