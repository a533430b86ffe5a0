"""The help of `rlt` and of each verb, and the nearest name to a misspelled one. Nothing heavy is imported.

    VERBS            every verb: usage, one line, the options that most people set
    options.json     every option of every verb, as the parsers have them; scripts/options.py writes it
    print_screen     the two put together: `rlt VERB --help`, at once

`rlt VERB --config NAME --help` shows the classes and the values of a config, which only the parser knows:
options.py. `rlt VERB --help-all` is the parser's own help.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("options.json")
HELPS = {"-h", "--help"}
MOST_LINES = 60
# Of a terminal without a size, and of a pipe.
COLUMNS = 110
VALUE_COLUMNS = 32
RUN = ("config", "output_dir", "resume", "overwrite", "seed")
DATA = ("data.source", "data.num_embedded_rows", "data.max_rows", "data.tags")
SAMPLING = ("rollouts.sampling.temperature", "rollouts.sampling.max_completion_length", "rollouts.engine")
MACHINE = ("trainer.accelerator", "trainer.devices", "trainer.precision")
SCORING = ("model.teacher", "model.student", "model.reward.kl_weight", "model.reward.kl_estimator")


@dataclass(frozen=True)
class Verb:
    """What the helps say of a verb.

    Attributes:
        usage: What is typed after `rlt VERB`.
        line: What it does, in one line.
        common: The options of its screen, in order.
    """

    usage: str
    line: str
    common: tuple[str, ...] = ()


VERBS: dict[str, Verb] = {
    "demo": Verb(
        "[--output_dir DIR]",
        "Show what RLT does for a student: all stages in miniature, one to two minutes.",
        ("output_dir", "resume"),
    ),
    "configs": Verb(
        "[NAME] [--copy DIR]", "List the configs of the package, show one of them, or copy it.", ("copy",)
    ),
    "fit": Verb(
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Train a teacher or a student, by the stage that the config is of.",
        (
            *(*RUN, "ckpt_path"),
            *("trainer.max_steps", "trainer.max_epochs", *MACHINE, "trainer.strategy"),
            *("model.teacher", "model.student", "model.pretrained", "model.group_size"),
            *("model.reward.kl_weight", "model.reward.kl_estimator"),
            *("model.optimizer.lr", "model.optimizer.scheduler", "model.optimizer.warmup_frac", "model.lora"),
            *("model.micro_batch_tokens", "model.gradient_checkpointing", "model.dtype"),
            *("data.source", "data.trace_columns", "data.prompts_per_step", "data.max_prompt_length"),
            *("data.val_rows", "data.val_source", "data.tags"),
            *(*SAMPLING, "rollouts.asynchronous"),
            *("checkpoint.every_n_train_steps", "export.adapter"),
        ),
    ),
    "validate": Verb(
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Measure reward or loss on held-out rows, without training.",
        (
            *(*RUN, "ckpt_path", *MACHINE, *SCORING, "model.pretrained", "model.micro_batch_tokens"),
            *(*DATA, "data.val_rows", "data.val_source", "data.val_batch_size"),
            *(*SAMPLING, "rollouts.val_completions"),
        ),
    ),
    "predict": Verb(
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Let a teacher write a distillation set (generate), or score given explanations (score, rank).",
        (
            *(*RUN, *MACHINE, *SCORING, "model.micro_batch_tokens", "model.dtype"),
            *(*DATA, "data.split", "data.trace_columns", "data.student_context", "data.val_batch_size"),
            *(*SAMPLING, "rollouts.engine.urls", "rollouts.num_traces", "rollouts.max_resamples"),
            *("distillation.select", "distillation.per_problem", "scores.rank_groups", "scores.per_token"),
        ),
    ),
    "test": Verb(
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Evaluate a student: its accuracy on sets of problems.",
        (
            *(*RUN, *MACHINE, "model.pretrained", "model.dtype"),
            *("data.sets", "data.max_rows", "data.num_samples", "data.responses", "data.batch_size"),
            *("data.tags", "data.student_system_prompt"),
            *("rollouts.num_samples", *SAMPLING, "rollouts.engine.urls", "rollouts.seed"),
        ),
    ),
    "plan": Verb(
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Estimate the memory and the time that a run would need; nothing is loaded.",
        (
            "config",
            *("plan.verb", "plan.device", "plan.device_gib", "plan.prompt_length", "plan.completion_length"),
            *("plan.mean_completion_length", "plan.mfu", "plan.decode_tokens_per_s", "plan.json"),
            *("trainer.devices", "trainer.num_nodes", "trainer.max_steps", "trainer.strategy"),
            *("model.teacher", "model.student", "model.pretrained", "model.group_size"),
            *("model.micro_batch_tokens", "model.gradient_checkpointing", "model.lora", "model.dtype"),
            *("data.source", "data.prompts_per_step", "data.max_prompt_length", "data.max_length"),
            *("rollouts.sampling.max_completion_length", "rollouts.engine"),
        ),
    ),
    "check": Verb(
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Check on your rows and models, before a stage, whether its run can teach anything.",
        (
            *("config", "check.rows", "check.completions", *MACHINE),
            *("trainer.max_steps", "trainer.max_epochs", *SCORING, "model.pretrained"),
            *(*DATA, "data.prompts_per_step", "data.max_prompt_length", "data.max_length"),
            *(*SAMPLING, "rollouts.engine.urls"),
        ),
    ),
    "explain": Verb(
        "--config CONFIG [--explain.row N] [--KEY VALUE ...]",
        "Show one explanation's reward, by term and by token.",
        (
            "config",
            *("explain.row", "explain.rollouts", "explain.step", "explain.completion", "explain.question"),
            *("explain.solution", "explain.explanation", "explain.top", "explain.html"),
            *(*SCORING, *DATA, "data.trace_columns", "trainer.accelerator"),
        ),
    ),
    "teach": Verb(
        "RUN_OR_FOLDER --question '…' --solution '…' [--KEY VALUE ...]",
        "Let a teacher explain one problem, and show what the explanation is worth to a student.",
        (
            *("question", "solution", "file", "row", "num", "url", "temperature", "max_tokens", "seed"),
            *("top", "html", "json", "config", *SCORING, "data.tags", "trainer.accelerator"),
        ),
    ),
    "export": Verb(
        "--ckpt_path CHECKPOINT --output_dir FOLDER",
        "Make a Hugging Face folder from a checkpoint of any strategy, on a CPU.",
        ("ckpt_path", "output_dir", "dtype", "adapter", "overwrite"),
    ),
    "push": Verb(
        "RUN [--data] --repo_id USER/NAME",
        "Publish a run's model, or with --data its distillation set, on the Hugging Face hub.",
        ("repo_id", "data", "private", "evaluations"),
    ),
    "chat": Verb(
        "--model.path MODEL [--model.url URL]",
        "Ask a trained student in the terminal; what is piped in is one question.",
        (
            *("model.path", "model.url", "model.served_model", "model.api_key_env", "model.dtype"),
            *("model.trust_remote_code", "tags", "student_system_prompt", "format_from", "force_format"),
            *("temperature", "top_p", "max_tokens", "seed"),
        ),
    ),
    "report": Verb(
        "RUN_DIR [RUN_DIR ...] [--output FILE]",
        "Write one page of runs: curves, completions, token by token.",
        ("output", "max_completions", "max_text_mib"),
    ),
    "dashboard": Verb(
        "--project PROJECT [--entity ENTITY]",
        "Save a W&B workspace that shows all metrics of a project's runs by iteration.",
        ("project", "entity", "name", "run_dir"),
    ),
    "completion": Verb("bash|zsh", "Print a script that completes verbs, options and configs in a shell."),
}

# The module that comes first where several have an option.
FIRST = "rlt_lightning.modules.RLTModule"
# Lightning's texts of these are about its other users.
TEXTS = {
    "config": "An experiment or overlay by its name, or a file of your own; a later one wins.",
    "ckpt_path": "last or best of --output_dir, a checkpoint, or a run: its weights are loaded first.",
    "trainer.accelerator": "cpu or gpu; auto takes a GPU if there is one.",
    "trainer.devices": "Number of processes, a GPU each; auto takes all GPUs.",
    "trainer.precision": "32-true or bf16-mixed.",
    "trainer.strategy": "auto, ddp, or an overlay's for weights in shards: overlays/zero3, overlays/fsdp2.",
    "trainer.max_steps": "Optimizer steps, each of them one RL iteration; -1: as max_epochs says.",
    "trainer.max_epochs": "Passes over the data; -1 is no limit.",
    "trainer.val_check_interval": "Steps between validations, or a fraction of an epoch.",
    "trainer.num_nodes": "Number of machines.",
}

STAGES = """The stages, in their order (`rlt configs` lists all experiments and overlays):

  rlt fit --config teacher_sft                  stage 1: warm the teacher up on reasoning traces
  rlt fit --config teacher_rlt                  stage 2: GRPO with the dense reward of a frozen student
  rlt predict --config generate                 stage 3: the trained teacher writes a distillation set
  rlt fit --config student_sft                  stage 4: a student learns from the set
  rlt fit --config student_opd                  stage 4b: it learns on its own answers from a teacher
  rlt test --config evaluate                    stage 5: accuracy on evaluation sets, next to the paper's

  rlt fit --config quickstart                   a tiny teacher, a tiny student and GRPO, in half a minute
  rlt fit --config student_grpo                 traditional RL, by correct answers
  rlt fit --config student_likelihood           thinking without a checker, by likelihood rewards
  rlt predict --config rank                     score your own explanations, and group them by reward

Options of every stage:
  --output_dir DIR    the run folder; runs/<config>-<time> by default
  --resume true       resume the run in --output_dir, or start it if there is none
  --ckpt_path last    load the newest checkpoint of --output_dir; best: the best by validation
  --seed N            seed of everything random; --data.seed 3 and the like override it
  --help              what most people set; with --config, the settings of its classes and their values
  --help-all          every option; `rlt fit --model.help CLASS` those of a class

rlt --version shows the version, rlt completion bash|zsh a script for tab completion.
"""

FIRST_RUN = """rlt trains Reinforcement-Learned Teachers (arXiv:2506.08388). First see what that does for a
student, in one to two minutes on two CPU cores; then make a run of your own, half a minute long:

  rlt demo
  rlt fit --config quickstart --output_dir runs/try

Their last lines say where everything is and what to run next. `rlt VERB --help` shows what to set:

"""


@dataclass(frozen=True)
class Option:
    """An option of a verb, or an argument of a class.

    Attributes:
        name: Without its dashes: `trainer.max_steps`. Of a class: without what it has where it is used.
        kind: What it takes: INT, FLOAT, STR, `true|false`, names between bars, or a class.
        default: As a command line would give it; None: there is none.
        help: What it does.
        classes: The classes of this package that it takes; the default's first.
    """

    name: str
    kind: str
    default: str | None = None
    help: str = ""
    classes: tuple[str, ...] = ()


# The table of all options


@cache
def read_table() -> dict[str, Any]:
    """Return what `options.json` holds: the options of `verbs`, and those of `classes`."""
    table: dict[str, Any] = json.loads(TABLE.read_text())
    for section in table.values():
        rows = {
            f"{owner} {row['name']}": row
            for owner, own in section.items()
            for row in own
            if isinstance(row, dict)
        }
        for owner, own in section.items():
            section[owner] = [rows[row] if isinstance(row, str) else row for row in own]
    return table


def list_options(verb: str) -> list[tuple[Option, str]]:
    """Return each option of a verb, with those of its classes, and the class of model or data that has it.

    Several classes may have an option of the same name: it is in the list for each of them.
    """
    return [*expand(read_options("verbs", verb))]


def read_options(section: str, owner: str) -> list[Option]:
    """Return the options that the table holds under `verbs` or `classes`; those of a verb with full names."""
    return [
        Option(**(row | {"classes": tuple(row.get("classes", ()))})) for row in read_table()[section][owner]
    ]


def expand(
    options: Iterable[Option], prefix: str = "", within: tuple[str, ...] = ()
) -> Iterator[tuple[Option, str]]:
    """Yield options with their full names, each followed by those of the classes that it takes.

    Beside each stands the outermost class that it is of, or an empty text. A class inside itself is left out.
    """
    for option in options:
        full = replace(option, name=prefix + option.name)
        yield full, within[0] if within else ""
        # The default class comes first: its defaults apply.
        for path in sorted(option.classes, key=lambda path: path.rpartition(".")[2] != option.default):
            if path not in within:
                yield from expand(read_options("classes", path), f"{full.name}.", (*within, path))


def write_rows(section: Mapping[str, Iterable[Option]]) -> dict[str, list[Any]]:
    """Return the options of verbs or classes as the table holds them; `VERB NAME` is an earlier verb's."""
    first: dict[str, str] = {}
    found: dict[str, list[Any]] = {}
    for owner, options in section.items():
        rows = found[owner] = []
        for option in options:
            row = {key: value for key, value in asdict(option).items() if value or key == "default"}
            text = json.dumps(row)
            rows.append(first.get(text, row))
            first.setdefault(text, f"{owner} {option.name}")
    return found


# The screens


def print_main_help() -> None:
    """Print `rlt --help`: every verb, the stages, and what all of them take."""
    print("usage: rlt VERB [--config CONFIG ...] [--KEY VALUE ...]\n")
    print("Train, apply and evaluate Reinforcement-Learned Teachers (arXiv:2506.08388).\n")
    print_verbs()
    print(f"\n{STAGES}", end="")


def print_verbs() -> None:
    """Print a line of every verb."""
    for name, verb in VERBS.items():
        print(f"  rlt {name:10} {verb.line}")


def print_screen(verb: str) -> None:
    """Print `rlt VERB --help`."""
    known: dict[str, dict[str, Option]] = {}
    for option, owner in list_options(verb):
        known.setdefault(option.name, {}).setdefault(owner, option)
    groups: list[tuple[str, list[Option]]] = []
    for name in VERBS[verb].common:
        owners = sorted(known[name], key=lambda owner: owner != FIRST)
        heading = name_group(name, owners)
        if heading not in [title for title, _ in groups[-1:] if not title] + [t for t, _ in groups if t]:
            groups.append((heading, []))
        own = next(options for title, options in reversed(groups) if title == heading)
        own.append(known[name][owners[0]])
    print_groups(verb, groups)


def print_settings(verb: str, words: Iterable[str]) -> bool:
    """Print the options of a dataclass within a class if `--OPTION.help` asks for them, and return whether.

    The parser lists such a help among those of the class, but refuses it.
    """
    asked = {word[2:].removesuffix(".help") for word in words if re.fullmatch(r"--[\w.]+\.help", word)}
    groups: dict[str, dict[str, Option]] = {}
    for option, owner in list_options(verb) if asked else []:
        if owner and option.name in asked and len(option.classes) == 1:
            groups.setdefault(f"{option.name}: {option.kind}", {})
        for heading, own in groups.items():
            if option.name.rpartition(".")[0] == heading.partition(":")[0]:
                own[option.name] = option
    if groups:
        print_groups(verb, [(heading, [*own.values()]) for heading, own in groups.items()])
    return bool(groups)


def name_group(name: str, owners: Sequence[str]) -> str:
    """Return the heading above an option of a module or of data: the classes that have it; else nothing."""
    section = name.partition(".")[0]
    names = [owner.rpartition(".")[2] for owner in owners]
    return f"{section}: {', '.join(names)}" if section in ("model", "data") and any(names) else ""


def print_groups(
    verb: str,
    groups: Sequence[tuple[str, Sequence[Option]]],
    values: Mapping[str, str] | None = None,
    others: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Print options under their headings, one line each.

    Args:
        verb: The verb.
        groups: Headings and their options.
        values: Values that a config sets, by the options' names.
        others: Names of further options, by heading.
    """
    usage, values = VERBS[verb], values or {}
    print(f"usage: rlt {verb} {usage.usage}\n\n{usage.line}")
    width = count_columns()
    shown = {o.name: format_name(o, values.get(o.name)) for _, options in groups for o in options}
    place = max([20, *(len(text) for text in shown.values() if len(text) < 0.4 * width)])
    for heading, options in groups:
        print(f"\n{heading}" if heading else "")
        for option in options:
            name = f"{'*' if option.name in values else ' '} {shown[option.name]:{place}}  "
            print(name + shorten(TEXTS.get(option.name, option.help), max(20, width - len(name))))
        if others and others.get(heading):
            print(wrap_names(others[heading]))
    if groups:
        star = "; * is set by the config" if values else ""
        print(f"\nA value is the default, in capitals what an option takes{star}.")
    if any(option.name not in shown for option, _ in list_options(verb)):
        print(f"all options: rlt {verb} --help-all")


def wrap_names(names: Iterable[str]) -> str:
    """Return names that are not explained, in indented lines."""
    text = f"and {', '.join(names)}"
    return textwrap.fill(text, count_columns(), initial_indent="  ", subsequent_indent="    ")


def format_name(option: Option, value: str | None = None) -> str:
    """Return an option with the value of the config, its default, or what it takes."""
    words = option.kind.split("|")
    choices = [word for word in words if not word[:1].isupper()]
    if value is None and choices == words:  # the default first
        default = [option.default] if option.default in choices else []
        text = "|".join(dict.fromkeys([*default, *choices]))
        value = text if len(text) <= VALUE_COLUMNS else None
    value = value or option.default or ("VALUE" if words == choices else words[0])
    return f"--{option.name}={value if len(value) <= VALUE_COLUMNS else value[: VALUE_COLUMNS - 1] + '…'}"


def shorten(text: str, room: int) -> str:
    """Return the first sentence of a help, cut at a word where it is longer than the room."""
    sentence = " ".join(text.split()).partition(". ")[0]
    return textwrap.shorten(sentence, room, placeholder=" …")


def count_columns() -> int:
    """Return the columns of the terminal, at least 80; of a pipe or a terminal without a size, 110."""
    return min(140, max(80, shutil.get_terminal_size((COLUMNS, 24)).columns))


# Misspelled names


def suggest_verb(name: str) -> str:
    """Return what to say of a verb that there is not."""
    near = ["fit"] if name in ("train", "run") else get_close_matches(name, VERBS, n=1, cutoff=0.6)
    hint = f" Did you mean rlt {near[0]}?" if near else ""
    hint = " For help type rlt --help, or rlt VERB --help." if name == "help" else hint
    return f"A verb must be one of {', '.join(VERBS)}, but got '{name}'.{hint}"


def suggest_option(name: str, known: Iterable[str]) -> list[str]:
    """Return the known options that a wrong name may mean, at most two, the nearest first.

    The last part counts more than what stands before it: `max_steps` and `trainr.max_steps` are
    `trainer.max_steps`.

    Args:
        name: Without dashes, such as `model.group_sise`.
        known: The options that there are.
    """
    section, _, end = name.rpartition(".")
    scores: dict[str, float] = {}
    for option in dict.fromkeys(known):
        its_section, _, its_end = option.rpartition(".")
        near = SequenceMatcher(None, end, its_end).ratio()
        if section:
            scores[option] = 0.6 * near + 0.4 * SequenceMatcher(None, section, its_section).ratio()
        elif near >= 0.75:  # the fewer parts are missing, the likelier
            scores[option] = near - 0.15 * bool(its_section) - 0.02 * option.count(".")
    best = max(scores.values(), default=0.0)
    found = [option for option, value in scores.items() if value >= max(0.6, best - 0.03)]
    if section:
        found = [option for option in found if scores[option] >= 0.75]
    return sorted(found, key=lambda option: -scores[option])[:2]
