"""`rlt push` and `export.push_to_hub`: publish a model or a distillation set on the Hugging Face hub.

    what is asked of the hub                       what a failure there leaves
    make the repository, private                   nothing
    is it as private as it was asked to be?        the repository, as it was
    check the card's header                        the same
    upload large files                             the same: nothing refers to them yet
    commit                                         the repository with the files before, or with all new ones

A push reads the run and changes nothing there, so that it can be repeated after any failure.

`client.py` makes the repository and the commit, and says why one failed.

The card that lies beside a model or a data set is completed on its way:

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
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rlt_lightning.checkpoints.card import CARD, LICENCE, read_card
from rlt_lightning.checkpoints.folder import list_checkpoints
from rlt_lightning.console import announce
from rlt_lightning.datamodules.evaluation_sets import CHOICE_COLUMNS, PRIVATE_SOURCES, explain_difference
from rlt_lightning.datamodules.sources import READERS, MemoryRows, parse_sources
from rlt_lightning.evaluation.results import HEADER, build_result_row, render_table
from rlt_lightning.hub.client import Repository, commit, open_repository, read_header_on_hub, read_token
from rlt_lightning.pretrained import is_model_folder, load_format
from rlt_lightning.run.data_card import TABLE
from rlt_lightning.run.folder import read_settings
from rlt_lightning.run.metrics import find_metric, training_name
from rlt_lightning.run.metrics_csv import Curve, read_metrics
from rlt_lightning.run.redaction import redact
from rlt_lightning.types import InputError, as_list

# The row of a data card that names the sources of its rows.
SOURCES = re.compile(r"^\| source \| (.+) \(\d+ usable rows\) \|$", re.MULTILINE)
# Metrics on a card beside the terms of the reward.
SHOWN = ("policy/loss", "policy/kl_ref", "rollout/length_mean", "rollout/closed_frac")
SETTINGS = "rlt_config.yaml"  # the name of a run's config.yaml in a repository
# A path from the root or the home folder; its last two parts say enough.
PLACE = re.compile(r"(?<![\w:/.~])~?(?:/[^\s/|,()'\"`]+)+/([^\s/|,()'\"`]+/[^\s/|,()'\"`]+)")
# As `project.urls` of pyproject.toml says. Once the package is on PyPI, a card can say `pip install`.
REPOSITORY = "https://example.org/rlt_lightning"
HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")
# Header of a model or of a data set by its id; empty if it cannot be read.
HeaderOf = Callable[[str], dict[str, Any]]


def push(
    run_dir: str,
    repo_id: str | None = None,
    data: bool = False,
    private: bool = True,
    evaluations: list[str] | str | None = None,
) -> None:
    """Publish the model of a run, or its distillation set, on the Hugging Face hub.

    The token is read from the environment variable HF_TOKEN, the address of the hub from HF_ENDPOINT.

    Args:
        run_dir: The run's folder, or a model folder.
        repo_id: The repository, USER/NAME, made if there is none; None: the run's export.push_to_hub.
        data: Push the distillation set instead of the model.
        private: Only you see the repository. False makes a new repository public, and is needed to push to a
            public one.
        evaluations: Folders of `rlt test` whose results the card shows; None: those beside the run that are
            of this model.

    Raises:
        InputError: If there is nothing to push, no token, or rows that must not be published.
        PushError: If the hub refuses or cannot be reached.
    """
    read_token()  # a push without one fails before it reads anything
    folder = Path(run_dir).expanduser()
    repository = (push_data if data else push_model)(folder, repo_id, private, as_list(evaluations))
    print(f"Done: {repository.url} ({'private' if repository.private else 'public'}), from {folder}")


def push_model(folder: Path, repo_id: str | None, private: bool, evaluations: list[str]) -> Repository:
    """Push the model of a run with its card and the run's settings; arguments as `push`."""
    model, run = find_model(folder)
    paths = [find_evaluation(name) for name in evaluations] or find_evaluations(run, model)
    if repo_id is None and run is not None:
        repo_id = (read_settings(run).get("export") or {}).get("push_to_hub")
    repository = open_repository(require_id(repo_id, f"rlt push {folder}"), "model", private)
    card = complete_model_card(model, run, repository.id, paths, partial(read_header_on_hub, repository))
    names = [path.relative_to(model) for path in sorted(model.rglob("*")) if path.is_file()]
    # The card is pushed as a text. Hidden files are not the model's.
    files = {str(name): model / name for name in names if str(name) != CARD and is_visible(name)}
    commit(repository, files, {CARD: card} | name_settings(run))
    print(f"Evaluations on the card: {', '.join(str(path.parent) for path in paths) or 'none'}")
    return repository


def push_data(folder: Path, repo_id: str | None, private: bool, evaluations: list[str]) -> Repository:
    """Push the distillation set of a run with its card and the run's settings; arguments as `push`."""
    if evaluations:
        raise InputError("--evaluations are of a model, but --data pushes a data set. Drop one of them.")
    require_data(folder)
    repository = open_repository(require_id(repo_id, f"rlt push {folder} --data"), "dataset", private)
    card = complete_data_card(folder, repository.id, partial(read_header_on_hub, repository))
    commit(repository, {TABLE: folder / TABLE}, {CARD: card} | name_settings(folder))
    return repository


# What is pushed, and what is not


def find_model(folder: Path) -> tuple[Path, Path | None]:
    """Return the model folder that a name stands for, and its run folder if it has one.

    Raises:
        InputError: If there is no model; the message says what makes one.
    """
    run: Path | None = folder
    model = folder / "model"
    if not is_model_folder(model) and is_model_folder(folder):
        model, parent = folder, folder.resolve().parent
        is_of_run = folder.resolve().name == "model" and (parent / "config.yaml").exists()
        run = parent if is_of_run else None
    if is_model_folder(model):
        if not (model / CARD).is_file():
            raise InputError(f"A model needs a card to be pushed, but {model / CARD} is missing. Write it.")
        return model, run
    if list_checkpoints(folder / "checkpoints"):
        raise InputError(
            f"{folder} must have a model/ to be pushed, but has only checkpoints. Make it: rlt export "
            f"--ckpt_path {folder} --output_dir {folder / 'model'}"
        )
    if (folder / TABLE).exists():
        raise InputError(
            f"{folder} has no model, but a distillation set. To push it: rlt push {folder} --data"
        )
    raise InputError(
        f"rlt push needs the folder of a finished rlt fit, or a model folder, but {folder} is neither. Train "
        "first: rlt fit --config quickstart"
    )


def name_settings(run: Path | None) -> dict[str, str]:
    """Return the text of a run's settings by its name in a repository; nothing if they are not known."""
    return {} if run is None or not (run / "config.yaml").exists() else {SETTINGS: format_settings(run)}


def require_data(folder: Path) -> None:
    """Check that a folder holds a distillation set which may be published.

    Raises:
        InputError: If there is none, or its rows are of a set whose text must not be published.
    """
    missing = [name for name in (TABLE, CARD) if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{folder} must hold a distillation set to be pushed, but has no {missing[0]}. Make one: "
            "rlt predict --config generate --model.teacher FOLDER"
        )
    require_public(folder)


def require_public(folder: Path) -> None:
    """Check that a distillation set holds no text of GPQA, whose authors ask not to publish it.

    Its rows are known by the names of their sources and by their columns, which a set keeps.

    Raises:
        InputError: If it does.
    """
    import pyarrow.parquet  # type: ignore[import-untyped]

    private = [name.rpartition("/")[2].lower() for name in PRIVATE_SOURCES]
    sources = list_origins(folder)
    named = [s for s in sources if any(name in s.rpartition("/")[2].lower() for name in private)]
    columns = set(pyarrow.parquet.read_schema(folder / TABLE).names)
    if named or columns >= set(CHOICE_COLUMNS):
        why = f"its source is {named[0]}" if named else "its rows have GPQA's columns"
        raise InputError(
            f"GPQA's rows must not be published, as their authors ask, but {folder} seems to hold some: "
            f"{why}. Make a set of other rows."
        )


def list_origins(folder: Path) -> list[str]:
    """Return the names of a set's sources; of one that another run here has made, its sources too.

    A script writes no config.yaml, but the data card of its set names the sources too.
    """
    found: list[str] = []
    folders = [folder.resolve()]
    for place in folders:  # which grows
        names = list_source_names(read_settings(place))
        if (place / CARD).is_file():
            recipe = SOURCES.findall((place / CARD).read_text(encoding="utf-8", errors="replace"))
            names += [name for line in recipe for name in line.split(", ")]
        found += names
        paths = (Path(name).expanduser().resolve() for name in names)
        beside = (path if path.is_dir() else path.parent for path in paths if path.exists())
        folders += [path for path in dict.fromkeys(beside) if (path / TABLE).exists() and path not in folders]
    return found


def find_evaluation(name: str) -> Path:
    """Return the results in a folder of `rlt test`.

    Raises:
        InputError: If it has none.
    """
    path = Path(name).expanduser() / "evaluation.json"
    if not path.is_file():
        raise InputError(
            f"--evaluations must name folders of rlt test, but {name} has no evaluation.json. Evaluate "
            "first: rlt test --config evaluate --model.pretrained FOLDER"
        )
    return path


def is_visible(name: Path) -> bool:
    """Return whether neither a file nor a folder that it lies in is hidden."""
    return not any(part.startswith(".") for part in name.parts)


def require_id(repo_id: str | None, command: str) -> str:
    """Return the repository that was named.

    Raises:
        InputError: If none was.
    """
    if repo_id is None:
        raise InputError(f"A push needs a repository: {command} --repo_id USER/NAME")
    return repo_id


# The card, completed


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
    sections = [card.text.strip(), "## Use", format_code("python", code), "Train a student on it:"]
    sections += [format_code("sh", train), *list_repetition(run, repo_id, "predict")]
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
    if judge := summary.get("judge"):
        notes.append(f"Judged by {judge}.")
    return "\n".join([table, *notes]).strip()


def list_commands(folder: Path, repo_id: str, header: Any) -> list[str]:
    """Return how to use a model, which depends on what it was trained as."""
    trained = load_format(str(folder))
    install = f"# rlt-lightning, to be installed first: {REPOSITORY}"
    if (folder / "adapter_config.json").exists():
        base_model, name = header.base_model or "BASE", repo_id.rpartition("/")[2]
        return [format_code("sh", f"vllm serve {base_model} --enable-lora --lora-modules {name}={repo_id}")]
    if trained is not None and trained.role == "teacher":
        return [
            "This model explains given solutions:",
            format_code(
                "sh",
                f"{install}\nrlt explain {repo_id} --model.student STUDENT --question '…' --solution '…'",
            ),
        ]
    lines = [install, f"rlt chat --model.path {repo_id}", f"vllm serve {repo_id}  # for any OpenAI client"]
    return ["This model answers questions:", format_code("sh", "\n".join(lines))]


def list_repetition(run: Path | None, repo_id: str, verb: str) -> list[str]:
    """Return how to repeat the run; nothing if its settings are not known."""
    if run is None or not (run / "config.yaml").exists():
        return []
    kind = "" if verb == "fit" else "--repo-type dataset "
    lines = [
        f"hf download {repo_id} {SETTINGS} {kind}--local-dir .",
        f"rlt {verb} --config {SETTINGS} --output_dir runs/again",
    ]
    return [f"`{SETTINGS}` has all settings of the run. To repeat it:", format_code("sh", "\n".join(lines))]


def format_code(language: str, code: str) -> str:
    """Return code as a Markdown block."""
    return f"```{language}\n{code}\n```"
