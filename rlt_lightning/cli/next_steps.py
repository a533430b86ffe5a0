"""What a run prints at its end: its files, and the command of the next stage.

The command keeps the run's format and device and stays within its models' contexts.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from rlt_lightning.datamodules.evaluation_sets import SETS
from rlt_lightning.datamodules.sources import parse_sources
from rlt_lightning.datamodules.token_cache import StoredItems
from rlt_lightning.datamodules.tokenize import TASKS
from rlt_lightning.models.embedded import MINIATURES
from rlt_lightning.pretrained import context_length
from rlt_lightning.run.folder import read_settings
from rlt_lightning.run.result import FitResult
from rlt_lightning.run.shipped import find_config
from rlt_lightning.tasks import EMBEDDED
from rlt_lightning.types import as_list

# Settings of the format, which are the same in all stages.
STUDENT_FORMAT = ("tags", "student_system_prompt")
TEACHER_FORMAT = (*STUDENT_FORMAT, "teacher_system_prompt", "format_from")
# The config of a stage in the recipe -> the one that runs on a laptop.
ON_A_CPU = {
    "teacher_rlt": "quickstart_smollm2",
    "generate": "smollm2_generate",
    "student_sft": "smollm2_student_sft",
    "evaluate": "smollm2_evaluate",
}
# The same for runs with an embedded miniature, on last-digit chains.
IN_MINIATURE = {
    "teacher_rlt": "quickstart",
    "generate": "miniature_generate",
    "student_sft": "miniature_student_sft",
    "evaluate": "miniature_evaluate",
}
# The models that the recipe's configs name.
RECIPE_MODELS = {"Qwen/Qwen2.5-7B-Instruct", "bespokelabs/Bespoke-Stratos-7B"}
# Of config.json: a model that was trained from another has the same.
SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
OWN_ROWS = "rows of one's own"
OWN_SET = {"mine": "FILE"}  # an evaluation set to be filled in
MOST_STAGES = 8  # whose rows are followed back to their source
MAX_COMPLETION_LENGTH = "rollouts.sampling.max_completion_length"
Options = dict[str, Any]
MODEL = "the trained model, an ordinary Hugging Face folder"
ADAPTER = "the trained adapter, as peft and vLLM read it"
FIT_FILES = {
    "model": MODEL,
    "metrics.csv": "every metric of every step",
    "rollouts.jsonl": "every completion with its reward terms",
}
PREDICT_FILES = {
    "scores.jsonl": "every row with its reward and the terms of it",
    "groups.json": "groups of equal size by reward: rows in groups/, plot in groups.svg",
    "comparison.md": "where one trace beats the other most; all problems: comparison.jsonl",
    "traces.jsonl": "every trace with every term of its reward",
    "distillation.jsonl": "the traces that were selected; also as distillation.parquet",
    "README.md": "the data card",
}


# The same for a model's own answers.
ANSWER_FILES = {
    "traces.jsonl": "every answer with its verdict",
    "distillation.jsonl": "the right answers that were selected; also as distillation.parquet",
}


def print_after_fit(config: Namespace, on_cpu: bool, result: FitResult, examples: StoredItems) -> None:
    """Print what a finished training has learned and left, and the command of the next stage.

    Args:
        config: The run's resolved settings.
        on_cpu: Whether it ran on a CPU.
        result: What it has learned.
        examples: The items that it was trained on.
    """
    folder = Path(config.output_dir)
    adapter = (folder / "model" / "adapter_config.json").exists()
    print(f"\nDone: {result.steps} step{'s' if result.steps > 1 else ''}.")
    if line := result.line():
        print(f"First and last figures: {line}.")
    resume = {"checkpoints": f"to resume: --output_dir {folder} --resume true"}
    print_files(folder, FIT_FILES | ({"model": ADAPTER} if adapter else {}) | resume)
    print(f"See it: {find_program()} report {shlex.quote(str(folder))}")
    if not (folder / "model").exists() or adapter:
        return
    if config.data.init_args.task in ("teacher_sft", "rlt"):
        print(f"Try it: {shlex.join([find_program(), 'teach', str(folder), '--row', '1'])}")
    if following := propose_after_fit(config, on_cpu, examples):
        print(f"Next: {following}")


def print_after_predict(config: Namespace, on_cpu: bool) -> None:
    """Print what a finished scoring or generation left, and the command of the next stage."""
    folder = Path(config.output_dir)
    print("\nDone:")
    judged = config.data.init_args.task == "student_rl"
    print_files(folder, PREDICT_FILES | (ANSWER_FILES if judged else {}))
    traces = folder / "distillation.jsonl"
    if traces.exists() and (following := propose_after_generation(config, on_cpu, traces)):
        print(f"Next: {following}")


def print_files(folder: Path, meanings: dict[str, str]) -> None:
    """Print those files and folders that exist, with what they hold."""
    for name, meaning in meanings.items():
        if (folder / name).exists():
            print(f"  {folder / name}: {meaning}")


def propose_after_fit(config: Namespace, on_cpu: bool, examples: StoredItems) -> str | None:
    """Return what to do with the trained model and the command for it; arguments as `print_after_fit`."""
    data, models, model = config.data.init_args, config.model.init_args, f"{config.output_dir}/model"
    if data.task == "teacher_sft":
        name = choose_config("teacher_rlt", on_cpu, config)
        options: Options = {"model.teacher": model, **name_model("model.student", models.pretrained, on_cpu)}
        options |= {"data.source": name_source(data), **fit_completion_length(config, name, model, examples)}
        options |= keep_forced_format(data)
        own = OWN_ROWS in find_tasks(data.source) and options["data.source"] != "FILE"
        words = build_command("fit", name, options, data, TEACHER_FORMAT)
        which = " (on the warm-up's rows; any others with question and solution will do)" if own else ""
        return f"train it by its students' reward{which}:\n  {words}"
    if data.task == "rlt":
        name = choose_config("generate", on_cpu, config)
        new = choose_new_questions(data)
        lines = []
        for student in list_students(config):
            options = {"model.teacher": model, "model.student": student, **copy_sampling(config)}
            options |= lower_setting(name, "data.student_context", find_context(config, student))
            options |= new | keep_forced_format(data)
            lines.append(build_command("predict", name, options, data, TEACHER_FORMAT))
        which = "; FILE: questions that it was not trained on" if new["data.source"] == "FILE" else ""
        whom = "for students" if len(lines) == 1 else "for each student"
        return "\n  ".join([f"write data {whom} (docs/generating.md{which}):", *lines])
    if TASKS[data.task].role == "student":
        name = choose_config("evaluate", on_cpu, config)
        samples = data.task != "student_sft"
        sampling = copy_sampling(config) if samples else fit_completion_length(config, name, model, examples)
        sets = choose_sets(config, name)
        options = {"model.pretrained": model, "data.sets": sets, **sampling}
        words = build_command("test", name, options, data, STUDENT_FORMAT)
        which = "; FILE: problems that it was not trained on, with their answers" if sets == OWN_SET else ""
        return f"evaluate it (docs/evaluation.md{which}):\n  {words}"
    return None


def propose_after_generation(config: Namespace, on_cpu: bool, source: Path) -> str | None:
    """Return what to do with the selected traces and the command for it; None if there are none.

    Args:
        config: The run's resolved settings.
        on_cpu: Whether it ran on a CPU.
        source: The file of the traces.
    """
    data = config.data.init_args
    name = choose_config("student_sft", on_cpu, config)
    num_rows = sum(1 for _ in source.open())
    if not num_rows:
        return None
    lines = []
    # A model that wrote its own answers is what a student of them starts from.
    for student in list_students(config) or [config.model.init_args.teacher]:
        options: Options = {"data.source": str(source), **name_model("model.pretrained", student, on_cpu)}
        options |= keep_forced_format(data)
        options |= lower_setting(name, "data.prompts_per_step", num_rows)
        limit = data.student_context or find_context(config, student)
        options |= lower_setting(name, "data.max_length", limit)
        lines.append(build_command("fit", name, options, data, STUDENT_FORMAT))
    whom = "a student" if len(lines) == 1 else "each student"
    return "\n  ".join([f"train {whom} on them:", *lines])


def list_students(config: Namespace) -> list[str]:
    """Return the frozen students of a run; empty without one."""
    models = config.model.init_args
    several = models.get("students")
    return [*several] if several else [models.student] if models.get("student") else []


def keep_forced_format(data: Namespace) -> Options:
    """Return the option that uses a model in another format than its own, if this run has used it so."""
    return {"data.force_format": True} if data.get("force_format") else {}


def build_command(
    verb: str, config: str, options: Options, data: Namespace, format_settings: tuple[str, ...]
) -> str:
    """Return a command line with these options, in the format of the data."""
    formats = {f"data.{name}": data.get(name) for name in format_settings}
    unlike = {n: v for n, v in (options | formats).items() if v != read_setting(config, n)}
    words = (part for name, value in unlike.items() for part in (f"--{name}", write_word(value)))
    return shlex.join([find_program(), verb, "--config", config, *words])


def find_program() -> str:
    """Return the command that starts `rlt` here: its name where PATH has this one, else its file."""
    own, found = Path(sys.argv[0]), shutil.which("rlt")
    if own.name != "rlt":  # python -m rlt_lightning
        own = Path(sys.executable).with_name("rlt")
    if not own.exists() or (found is not None and own.samefile(found)):
        return "rlt"
    return str(own)


def write_word(value: Any) -> str:
    """Return a setting as the command line takes it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=Namespace.as_dict)


def choose_config(stage: str, on_cpu: bool, config: Namespace) -> str:
    """Return the name of a stage's config that fits the device and, on a CPU, this run's models."""
    models = {config.model.init_args.get(name) for name in ("pretrained", "teacher", "student")}
    models |= {*(config.model.init_args.get("students") or ())}
    laptop = IN_MINIATURE if any(map(is_miniature, filter(None, models))) else ON_A_CPU
    return laptop[stage] if on_cpu else stage


def is_miniature(model: str) -> bool:
    """Return whether a model is a miniature, or the folder of one that was trained from a miniature."""
    path = Path(model).expanduser() / "config.json"
    if model in MINIATURES or not path.is_file():
        return model in MINIATURES
    configs = [path, *(folder / "config.json" for folder in MINIATURES.values())]
    own, *shapes = ([json.loads(one.read_text()).get(key) for key in SHAPE] for one in configs)
    return own in shapes


def choose_sets(config: Namespace, proposed: str) -> Options | None:
    """Return the evaluation sets for a student of this run.

    They are those of its own evaluations while training; else those of the proposed config if they are of the
    task that it was trained on, or that task's; else OWN_SET, a placeholder.
    """
    for callback in as_list(config.trainer.callbacks):
        if str(callback.get("class_path", "")).endswith(".EvaluateEvery"):
            return dict(callback.init_args.sets)
    sets, kinds = read_setting(proposed, "data.sets"), find_tasks(config.data.init_args.source)
    embedded = sets.keys() & EMBEDDED.keys()
    if (not embedded and OWN_ROWS not in kinds) or (embedded and kinds <= sets.keys()):
        return sets
    return dict.fromkeys(sorted(kinds)) if kinds <= SETS.keys() else OWN_SET


def find_tasks(source: Any, depth: int = 0) -> set[str]:
    """Return what rows are of: names of embedded tasks, hub ids, and OWN_ROWS for files and rows of Python.

    Rows that a run has written are of what the run read.
    """
    found: set[str] = set()
    for one in parse_sources(source):
        name = one if isinstance(one, str) else OWN_ROWS
        if name in EMBEDDED:
            found.add(name.partition(":")[0])
            continue
        path = Path(name).expanduser()
        settings = read_settings(path.parent) if path.is_file() and depth < MOST_STAGES else {}
        before = (settings.get("data") or {}).get("init_args", {}).get("source")
        if before is not None:
            found |= find_tasks(before, depth + 1)
        else:
            found.add(OWN_ROWS if path.exists() or name == OWN_ROWS else name)
    return found


def name_model(option: str, model: str, on_cpu: bool) -> Options:
    """Return an option that names this run's model, unless the proposed config names it already."""
    return {} if model in RECIPE_MODELS and not on_cpu else {option: model}


def copy_sampling(config: Namespace) -> Options:
    """Return options that sample completions as this run has sampled them."""
    sampling = config.rollouts.sampling
    length = {MAX_COMPLETION_LENGTH: sampling.max_completion_length}
    return {"rollouts.sampling.temperature": sampling.temperature, **length}


def name_source(data: Namespace) -> Any:
    """Return the source of a run as an option; FILE stands for rows that its config holds."""
    return data.source if all(isinstance(source, str) for source in parse_sources(data.source)) else "FILE"


def choose_new_questions(data: Namespace) -> Options:
    """Return options for questions that this run has not seen: an embedded source has others by seed."""
    if all(source in EMBEDDED for source in parse_sources(data.source)):
        # The next seed is that of quickstart_smollm2_warmup, so the one after it.
        return {"data.source": data.source, "data.seed": data.seed + 2}
    return {"data.source": "FILE"}


def fit_completion_length(config: Namespace, proposed: str, model: str, examples: StoredItems) -> Options:
    """Return an option for completions as long as the examples, where the proposed config does not fit."""
    prompts = examples.sum_columns("num_prompt")
    longest_prompt, longest = int(prompts.max()), int((examples.sum_columns("token_ids") - prompts).max())
    limit = read_setting(proposed, MAX_COMPLETION_LENGTH)
    if limit is not None and longest <= limit <= find_context(config, model) - longest_prompt:
        return {}
    return {MAX_COMPLETION_LENGTH: longest}


def find_context(config: Namespace, model: str) -> int:
    """Return the context of a model that this run could load, tokens."""
    return context_length(model, config.model.init_args.trust_remote_code)


def lower_setting(config: str, name: str, limit: int) -> Options:
    """Return an option that lowers a setting of the proposed config to a limit; none if it is below."""
    value = read_setting(config, name)
    return {} if value is not None and value <= limit else {name: limit}


def read_setting(config: str, name: str) -> Any:
    """Return what a config sets for an option; None if it does not set it."""
    value: Any = yaml.safe_load(find_config(config).read_text())
    for key in name.split("."):
        value = value and value.get("init_args", value).get(key)
    return value
