"""Weights & Biases: one run per run folder, online with an account and offline without.

`WandbLogger` logs a run. `rlt dashboard` saves a workspace that shows every metric by iteration.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import loggers
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from rlt_lightning.console import waiting_for
from rlt_lightning.run.jsonl import rewrite
from rlt_lightning.run.metrics import (
    EVALUATION,
    OVERALL_FIGURES,
    SET_TITLES,
    list_metrics,
    read_entries,
    validation_name,
)
from rlt_lightning.run.redaction import redact
from rlt_lightning.types import InputError, missing_package

ITERATION = "iteration"  # the x axis of everything: optimizer steps taken, `step` in metrics.csv
TABLE = "completions"  # name of the table in W&B and of the texts in TensorBoard
TO_LOG_IN = "Call `wandb login`, or set WANDB_API_KEY"
MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")  # of wandb
NO_ACCOUNT = 3  # exit status of ASK; that of any other trouble is 1
ASK = f"""
import sys, wandb
try:
    sys.exit(0 if wandb.login(verify=False) else {NO_ACCOUNT})
except wandb.errors.UsageError as error:
    print(error, file=sys.stderr)
    sys.exit({NO_ACCOUNT})
"""


class WandbLogger(loggers.WandbLogger):
    """Log to Weights & Biases: online if there is an account, else offline, for `wandb sync`.

    The run's files and its id are in `wandb/` in the run folder, so a resumed run continues the same W&B run.

    Args:
        project: By default WANDB_PROJECT or rlt_lightning.
        entity: User or team; None: the account's default.
        name: Name of the run; None: the name of the run folder.
        group: Group of runs that belong together.
        tags: Tags of the run.
        offline: Whether to stay offline even with an account.
        save_dir: Folder for its files; "." is the run folder.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        offline: bool = False,
        save_dir: str = ".",
    ) -> None:
        if find_spec("wandb") is None:
            raise missing_package("WandbLogger", "wandb", "wandb", "leave the logger out")
        project = project or os.environ.get("WANDB_PROJECT", "rlt_lightning")
        super().__init__(
            name, save_dir, offline=offline, project=project, entity=entity, group=group, tags=tags
        )
        del self._wandb_init["anonymous"]  # wandb warns of this setting even if it is None
        self._last = 0  # the last iteration whose training was logged

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return the `wandb.Run`; the first use starts it."""
        if self._experiment is None:
            self._experiment = self._begin()
        return self._experiment

    def _begin(self) -> Any:
        """Start the run, or continue the run of the run folder, and print where it is."""
        import wandb

        folder = Path(self._wandb_init["dir"]).resolve()
        files = folder / "wandb"
        files.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_DATA_DIR", str(files / "data"))  # else tables are staged in the home
        mode, reason = self._mode()
        self._wandb_init |= {
            "dir": str(folder),
            "id": keep_id(files / "run_id"),
            "name": self._wandb_init["name"] or folder.name,
            "mode": mode,
        }
        # No terminal output, command line, host or git remote: any of them may hold a secret.
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, x_disable_meta=True, save_code=False, host="-"
        )
        try:
            with waiting_for("Weights & Biases to begin the run"):
                run = wandb.init(**self._wandb_init, settings=settings)
        except wandb.errors.Error as error:
            raise InputError(
                f"Weights & Biases must accept the run to log online, but: {' '.join(str(error).split())}. "
                "Check the account and the network, or set WANDB_MODE=offline and upload later."
            ) from error
        self._id = run.id
        run.define_metric(ITERATION, hidden=True)
        for prefix in dict.fromkeys(metric.prefix for metric in list_metrics()):
            run.define_metric(f"{prefix}/*", step_metric=ITERATION)
        where = str(run.url) if mode == "online" else f"{mode} ({reason})"
        where += f"; upload: wandb sync {files}/offline-run-*-{run.id}" if mode == "offline" else ""
        print(f"Weights & Biases: {where}", file=sys.stderr, flush=True)
        return run

    def _mode(self) -> tuple[str, str]:
        """Return where to log, and why.

        Raises:
            InputError: If WANDB_MODE needs an account, but there is none.
        """
        mode, reason = read_mode()
        if mode != "online":
            return mode, reason
        if self._offline:
            return "offline", "the logger's offline is true"
        if has_account():
            return "online", "there is an account"
        if "WANDB_MODE" in os.environ:
            raise InputError(f"{reason}, which needs an account. {TO_LOG_IN}, or unset it to log offline.")
        return "offline", "there is no account"

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        super().log_hyperparams(redact(params))

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log at an iteration. wandb counts steps separately, so a resumed run may log an iteration again."""
        axis = {} if step is None else {ITERATION: step}
        self.experiment.log({**metrics, **axis})
        if "perf/tokens_per_s" in metrics:  # an evaluation of the same iteration may be logged before
            self._last = int(step or 0)

    @rank_zero_only
    def catch_up(self, rows: Mapping[int, Mapping[str, str]]) -> None:
        """Log the iterations that a killed run may not have written, since wandb writes in blocks.

        Those up to the end of the last session that was not killed are written, those on the server too.

        Args:
            rows: Metrics by iteration, as in `metrics.csv`, up to the iteration that the run resumes from.
        """
        run, path = self.experiment, self._written()
        written = int(path.read_text()) if path.exists() else 0
        if self._wandb_init["mode"] == "online":
            written = max(written, run.summary.get(ITERATION, 0))
        for iteration, row in sorted(rows.items()):
            if iteration > written:
                self.log_metrics({name: float(value) for name, value in row.items()}, iteration)

    def _written(self) -> Path:
        """Return the file with the last iteration that is written for certain."""
        return Path(self._wandb_init["dir"]) / "wandb" / "written"

    @rank_zero_only
    def log_rows(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Log a table in place of the earlier one of this name; all rows have the columns of the first."""
        import wandb

        wandb.Table.MAX_ROWS = wandb.Table.MAX_ARTIFACT_ROWS  # else rows are dropped from 10,000 on
        columns: list[Any] = list(rows[0])
        data = [[row.get(column) for column in columns] for row in rows]
        self.log_metrics({name: wandb.Table(columns=columns, data=data)}, step)

    @rank_zero_only
    def alert(self, title: str, text: str, is_error: bool) -> None:
        """Send an alert to its subscribers."""
        if self._experiment is not None:  # None if the run could not start
            self._experiment.alert(title, text, level="ERROR" if is_error else "WARN")

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Finish the run; later logging continues it."""
        if self._experiment is not None:
            with waiting_for("Weights & Biases to take what was logged"):
                self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None
            if self._last and self._wandb_init["mode"] != "disabled":
                rewrite(self._written(), [f"{self._last}\n"])


def read_mode() -> tuple[str, str]:
    """Return what wandb's settings say: online, offline or disabled, and what set it.

    Raises:
        InputError: If WANDB_MODE has another value.
    """
    import wandb

    named = os.environ.get("WANDB_MODE")
    if named is not None and named not in MODES:  # wandb refuses an empty one too
        raise InputError(
            f"WANDB_MODE must be one of {', '.join(MODES)}, but is {named!r}. Correct it, or unset it."
        )
    asked = named or wandb.setup().settings.mode
    mode = {"dryrun": "offline", "run": "online"}.get(asked, asked)
    return mode, f"WANDB_MODE is {asked}" if "WANDB_MODE" in os.environ else f"`wandb {asked}` was called"


def has_account() -> bool:
    """Return whether wandb finds an account, without verifying it.

    wandb itself looks: where it keeps keys differs between its versions. It would ask for a key that it does
    not find, so it looks in a process without a terminal.

    Raises:
        InputError: If there is a key, but none that can be one.
    """
    environment = os.environ | {"WANDB_SILENT": "true"}  # else it also asks the server for the account's name
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode not in (0, NO_ACCOUNT) or (done.returncode and os.environ.get("WANDB_API_KEY")):
        reason = done.stderr.strip().rpartition("\n")[2]
        raise InputError(f"The account of Weights & Biases must be usable, but: {reason}")
    return done.returncode == 0


def keep_id(path: Path) -> str:
    """Return the run id in a file; if there is none, write a new id to it."""
    if not path.exists() or not path.read_text().strip():
        rewrite(path, [f"{secrets.token_hex(4)}\n"])
    return path.read_text().strip()


@contextmanager
def open_account() -> Iterator[Any]:
    """Yield the account's `wandb.Api`, and turn its errors into one line.

    Raises:
        InputError: If there is no account, or the server refuses.
    """
    import wandb

    mode, reason = read_mode()
    if mode != "online":
        raise InputError(f"A dashboard is saved in an account of Weights & Biases, but {reason}. Unset it.")
    if not has_account():
        raise InputError(
            f"A dashboard is saved in an account of Weights & Biases, but there is none. {TO_LOG_IN}."
        )
    try:
        yield wandb.Api()
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise InputError(f"Weights & Biases must take the dashboard, but: {error}") from error


def dashboard(
    project: str, entity: str | None = None, name: str = "rlt_lightning", run_dir: str | None = None
) -> None:
    """Save a workspace in a W&B project, with every metric by iteration, and print its address.

    Args:
        project: Where the runs are logged, as in trainer.logger.
        entity: User or team; None: the account's default.
        name: Name of the workspace. Each call saves a new one.
        run_dir: Folder of a run whose own metrics, such as additional terms of its reward, get panels too.

    Raises:
        InputError: If run_dir is no folder, or there is no account.
    """
    if run_dir is not None:
        if not Path(run_dir).is_dir():
            raise InputError(f"--run_dir must be the folder of a run, but {run_dir} is none. Correct it.")
        read_entries(Path(run_dir))
    if find_spec("wandb_workspaces") is None:
        raise missing_package("rlt dashboard", "wandb-workspaces", "wandb", "use TensorBoard")
    with open_account() as api:
        build_workspace(project, entity or api.default_entity, name).save()


def list_line_panels() -> dict[str, list[list[str]]]:
    """Return the metrics of every panel of lines, by prefix: metrics to be compared share a panel."""
    panels: dict[str, dict[str, list[str]]] = {}
    for metric in list_metrics():
        if metric.prefix != "eval" and metric.drawn != "stack":
            lines = panels.setdefault(metric.prefix, {}).setdefault(metric.panel or metric.name, [])
            lines += [metric.name] if metric.held_out is None else [metric.name, validation_name(metric.name)]
    return {prefix: list(found.values()) for prefix, found in panels.items()}


def build_workspace(project: str, entity: str, name: str) -> Any:
    """Return the definition of the workspace; nothing is sent."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    def lines(names: list[str], **options: Any) -> Any:
        return wr.LinePlot(x=ITERATION, y=[*names], **options)

    def bars(figure: str) -> Any:
        sets = [*SET_TITLES, "overall"] if figure in OVERALL_FIGURES else [*SET_TITLES]
        return wr.BarPlot(title=figure, metrics=[f"eval/{name}/{figure}" for name in sets])

    panels = {f"{prefix}/": [lines(names) for names in found] for prefix, found in list_line_panels().items()}
    phases = [metric.name for metric in list_metrics() if metric.drawn == "stack"]
    panels["perf/"].insert(0, lines(phases, title="seconds of an iteration", plot_type="stacked-area"))
    # A fit with EvaluateEvery has curves of any set, `rlt test` has bars.
    evaluated = [metric.name.rpartition("/")[2] for metric in EVALUATION]
    panels["eval/"] = [
        lines([], title=f"{figure} while training", metric_regex=f"eval/.*/{figure}")
        for figure in evaluated
        if figure != "num_problems"
    ]
    panels["eval/"] += [bars(figure) for figure in evaluated]
    panels[TABLE] = [wr.WeavePanelSummaryTable(table_name=TABLE, layout=wr.Layout(w=24, h=12))]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(name=title, panels=found, is_open=title in ("reward/", TABLE))
            for title, found in panels.items()
        ],
        settings=ws.WorkspaceSettings(x_axis=ITERATION),
    )
