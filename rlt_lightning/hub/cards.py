"""Cards for the hub: what lies beside a model or a data set, completed by results, licence and commands.

on the disk: header, how it was made    → what a user has changed there stays
metrics.csv, evaluation.json            → tables, and `model-index` in the header
config.yaml                             → the data's ids
the hub                                 → the licence of the base model or of the data
rlt_format.json                         → commands for a teacher or a student
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rlt_lightning.checkpoints.card import CARD, LICENCE, read_card
from rlt_lightning.console import announce
from rlt_lightning.datamodules.evaluation_sets import explain_difference
from rlt_lightning.datamodules.sources import READERS, MemoryRows, parse_sources
from rlt_lightning.evaluation.results import HEADER, build_result_row, render_table
from rlt_lightning.pretrained import load_format
from rlt_lightning.run.folder import read_settings
from rlt_lightning.run.metrics import find_metric, training_name
from rlt_lightning.run.metrics_csv import Curve, read_metrics
from rlt_lightning.run.redaction import redact
from rlt_lightning.types import InputError, as_list

# Metrics on a card beside the terms of the reward.
SHOWN = ("policy/loss", "policy/kl_ref", "rollout/length_mean", "rollout/closed_frac")
SETTINGS = "rlt_config.yaml"  # the name of a run's config.yaml in a repository
# A path from the root or the home folder; its last two parts say enough.
PLACE = re.compile(r"(?<![\w:/.~])~?(?:/[^\s/|,()'\"`]+)+/([^\s/|,()'\"`]+/[^\s/|,()'\"`]+)")
HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")
# Header of a model or of a data set by its id; empty if it cannot be read.
HeaderOf = Callable[[str], dict[str, Any]]


def complete_model_card(
    folder: Path, run: Path | None, repo_id: str, evaluations: list[Path], header_of: HeaderOf
) -> str:
    """Return the card of a model folder with its run's results and with commands.

    Args:
        folder: The model folder.
        run: Its run folder, if it has one.
        repo_id: Where the card will stand.
        evaluations: Files that `rlt test` wrote about this model.
        header_of: Reads the header of the base model's card.

    Raises:
        InputError: If one of the files is not as it was written.
    """
    card = read_card(folder / CARD)
    header, settings = card.data, read_run_settings(run)
    header.pipeline_tag = header.get("pipeline_tag", "text-generation")
    header.datasets = header.get("datasets", [name for name, _ in list_hub_sources(settings)] or None)
    if header.base_model and not header.license:
        inherit_licence(header, header_of, as_list(header.base_model), folder / CARD)
    sections = [card.text.strip()]
    if run is not None and (table := format_training(run / "metrics.csv")):
        sections += ["## Training", "Means of the first and of the last tenth of the iterations.", table]
    if evaluations:
        summaries = [read_evaluation(path) for path in evaluations]
        header.model_name = repo_id.rpartition("/")[2]
        header.eval_results = [result for summary in summaries for result in list_results(summary)]
        sections += ["## Evaluation", *map(format_evaluation, summaries)]
    sections += ["## Use", *list_commands(folder, repo_id, header), *list_repetition(run, repo_id, "fit")]
    return finish_card(card, sections)


def complete_data_card(run: Path, repo_id: str, header_of: HeaderOf) -> str:
    """Return the card of a distillation set with licence, sources and commands.

    Args:
        run: The folder of the run that made the set.
        repo_id: Where the card will stand.
        header_of: Reads the header of the source's card.

    Raises:
        InputError: If a file is not as it was written.
    """
    card = read_card(run / CARD, "dataset")
    header = card.data
    names = [name for name, _ in list_hub_sources(read_run_settings(run))]
    header.task_categories = header.get("task_categories", ["text-generation"])
    header.source_datasets = header.get("source_datasets", names or None)
    if names and not header.get("license"):
        inherit_licence(header, header_of, names, run / CARD)
    code = f'import datasets\n\nrows = datasets.load_dataset("{repo_id}", split="train")'
    train = f"rlt fit --config student_sft --data.source {repo_id}"
    sections = [card.text.strip(), "## Use", fence("python", code), "Train a student on it:"]
    sections += [fence("sh", train), *list_repetition(run, repo_id, "predict")]
    return finish_card(card, sections)


def finish_card(card: Any, sections: list[str]) -> str:
    """Return the text of a card, without secrets and without the places of folders on this machine."""
    card.text = "\n" + redact_paths(redact("\n\n".join(sections))) + "\n"
    return str(card)


def redact_paths(text: str) -> str:
    """Return a text in which absolute paths keep only their last two parts: …/warmup/model."""
    return PLACE.sub(r"…/\1", text)


def read_run_settings(run: Path | None) -> dict[str, Any]:
    """Return a run's settings; none for a model folder without its run."""
    return {} if run is None else read_settings(run)


def format_settings(run: Path) -> str:
    """Return a run's settings as YAML, without secrets and without the places of folders."""
    settings = redact(read_settings(run))
    if "export" in settings:
        # Who repeats the run has another repository.
        settings["export"] = settings["export"] | {"push_to_hub": None}
    data = (settings.get("data") or {}).get("init_args") or {}
    for name in ("source", "val_source"):
        # Rows are no settings; as in a proposed command, FILE stands for them.
        if any(isinstance(source, MemoryRows) for source in parse_sources(data.get(name))):
            data[name] = "FILE"
    return redact_paths(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def list_source_names(settings: dict[str, Any]) -> list[str]:
    """Return the names of the sources of a run's rows; rows that its config holds have none."""
    sources = parse_sources(((settings.get("data") or {}).get("init_args") or {}).get("source"))
    return [source for source in sources if isinstance(source, str)]


def list_hub_sources(settings: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Return those sources of a run's rows that are data sets of the hub: id and configuration."""
    found = [parse_hub_source(source) for source in list_source_names(settings)]
    return list(dict.fromkeys(source for source in found if source is not None))


def parse_hub_source(source: str) -> tuple[str, str | None] | None:
    """Return id and configuration of a source that is a data set of the hub; None for any other."""
    match = HUB_ID.fullmatch(source)
    if match is None or Path(source).suffix in READERS or Path(source).expanduser().exists():
        return None
    return match.group(1), match.group(2)


def inherit_licence(header: Any, header_of: HeaderOf, names: list[str], card: Path) -> None:
    """Put the licence of the base model, or of the data, into a header, or say that it must be written there.

    Several data sets with different licences leave it open which one holds for a set made of them.
    """
    found = [{name: found[name] for name in LICENCE if found.get(name)} for found in map(header_of, names)]
    if all(licence == found[0] for licence in found) and found[0]:
        for name, value in found[0].items():
            header[name] = value
        return
    announce(
        f"The card names no licence, since that of {', '.join(names)} is not known. Write `license: ID` into "
        f"the header of {card} and repeat the push."
    )


def format_training(path: Path) -> str:
    """Return a Markdown table of what the training changed; empty if metrics.csv has nothing to show."""
    curves, _ = read_metrics(path)
    shown = {name: curve for name, curve in curves.items() if is_shown(name)}
    rows = [
        (f"`{name}`", find_metric(training_name(name)).title, *summarise_ends(curve))
        for name, curve in shown.items()
    ]
    return render_table([("metric", "", "first", "last"), *rows]).strip() if rows else ""


def is_shown(name: str) -> bool:
    """Return whether a metric, of training or held out, is on a card: terms of the reward and a few more."""
    is_term = name.startswith("reward/") and find_metric(training_name(name)).column
    return bool(is_term) or training_name(name) in SHOWN or name.endswith("/pass_at_1")


def summarise_ends(curve: Curve) -> tuple[str, str]:
    """Return the means of the first and of the last tenth of a curve, at least of one value each."""
    values = [value for value in curve[1] if value is not None]
    tenth = max(1, len(values) // 10)
    return f"{fmean(values[:tenth]):.4g}", f"{fmean(values[-tenth:]):.4g}"


def find_evaluations(run: Path | None, folder: Path) -> list[Path]:
    """Return the results of `rlt test` of a model that lie in its run or beside it, the oldest first.

    Results that are older than the model are of one that lay there before: they are left out.
    """
    if run is None:
        return []
    found = []
    for path in [*run.glob("test/evaluation.json"), *run.resolve().parent.glob("*/evaluation.json")]:
        try:
            model = read_evaluation(path).get("model")
        except InputError as error:
            # It may be of another model.
            announce(f"{error} The card leaves it out.")
            continue
        if model is None or Path(model).expanduser().resolve() != folder.resolve():
            continue
        if path.stat().st_mtime < find_write_time(folder):
            announce(f"{path} is older than {folder}, so the card leaves it out")
        else:
            found.append(path)
    return sorted(found, key=lambda path: path.stat().st_mtime)


def find_write_time(folder: Path) -> float:
    """Return when the newest weights of a model folder were written, in seconds as `os.stat` has them."""
    return max((file.stat().st_mtime for file in folder.glob("*.safetensors")), default=0.0)


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return the results that `rlt test` wrote.

    Raises:
        InputError: If the file holds something else.
    """
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        build_result_row(next(iter(summary["sets"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise InputError(
            f"{path} must hold the results of rlt test, but does not ({type(error).__name__}: {error}). Name "
            "the folder of an evaluation, or move the file away."
        ) from error
    return summary


def list_results(summary: dict[str, Any]) -> list[Any]:
    """Return pass@1 of each set, and with several responses pass@k and maj@k, as entries of `model-index`.

    Only figures, and the set's name and source: no text of any question.
    """
    from huggingface_hub import EvalResult

    found = []
    for name, figures in summary["sets"].items():
        identity = parse_hub_source(figures.get("source") or "")
        num = figures["num_samples"]
        kinds = {"pass_at_1": "pass@1"}
        kinds |= {"pass_at_k": f"pass@{num}", "maj_at_k": f"maj@{num}"} if num > 1 else {}
        for key, kind in kinds.items():
            if figures.get(key) is None:
                continue
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=name if identity is None else identity[0],
                    dataset_name=figures["title"],
                    dataset_config=identity and identity[1],
                    dataset_split=figures.get("split") if identity else None,
                    metric_type=kind,
                    metric_name=f"{kind}, %",
                    metric_value=round(100 * figures[key], 2),
                )
            )
    return found


def format_evaluation(summary: dict[str, Any]) -> str:
    """Return the results of `rlt test` as a table, with the settings that they depend on most."""
    sets = summary["sets"]
    table = render_table([HEADER, *map(build_result_row, sets.values())])
    notes = [
        explain_difference(name, found["differs"]) for name, found in sets.items() if found.get("differs")
    ]
    if sampling := (summary.get("rollouts") or {}).get("sampling"):
        length = sampling["max_completion_length"]
        notes.append(f"Temperature {sampling['temperature']}, at most {length} tokens a response.")
    return "\n".join([table, *notes]).strip()


def list_commands(folder: Path, repo_id: str, header: Any) -> list[str]:
    """Return how to use a model, which depends on what it was trained as."""
    trained = load_format(str(folder))
    install = "pip install rlt-lightning"
    if (folder / "adapter_config.json").exists():
        base_model, name = header.base_model or "BASE", repo_id.rpartition("/")[2]
        return [fence("sh", f"vllm serve {base_model} --enable-lora --lora-modules {name}={repo_id}")]
    if trained is not None and trained.role == "teacher":
        return [
            "This model explains given solutions:",
            fence("sh", f"{install}\nrlt teach {repo_id} --question '…' --solution '…'"),
        ]
    lines = [install, f"rlt chat --model.path {repo_id}", f"vllm serve {repo_id}  # for any OpenAI client"]
    return ["This model answers questions:", fence("sh", "\n".join(lines))]


def list_repetition(run: Path | None, repo_id: str, verb: str) -> list[str]:
    """Return how to repeat the run; nothing if its settings are not known."""
    if run is None or not (run / "config.yaml").exists():
        return []
    kind = "" if verb == "fit" else "--repo-type dataset "
    lines = [
        f"hf download {repo_id} {SETTINGS} {kind}--local-dir .",
        f"rlt {verb} --config {SETTINGS} --output_dir runs/again",
    ]
    return [f"`{SETTINGS}` has all settings of the run. To repeat it:", fence("sh", "\n".join(lines))]


def fence(language: str, code: str) -> str:
    """Return code as a Markdown block."""
    return f"```{language}\n{code}\n```"
