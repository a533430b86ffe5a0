"""`rlt dashboard`: a saved W&B workspace that shows every metric of docs/metrics.md."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlt_lightning.run.metrics import (
    EVALUATION,
    OVERALL_FIGURES,
    SET_TITLES,
    list_metrics,
    read_entries,
    validation_name,
)
from rlt_lightning.run.wandb_logger import ITERATION, TABLE, account
from rlt_lightning.types import InputError, missing_package


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
    with account() as api:
        workspace(project, entity or api.default_entity, name).save()


def line_panels() -> dict[str, list[list[str]]]:
    """Return the metrics of every panel of lines, by prefix: metrics to be compared share a panel."""
    panels: dict[str, dict[str, list[str]]] = {}
    for metric in list_metrics():
        if metric.prefix != "eval" and metric.drawn != "stack":
            lines = panels.setdefault(metric.prefix, {}).setdefault(metric.panel or metric.name, [])
            lines += [metric.name] if metric.held_out is None else [metric.name, validation_name(metric.name)]
    return {prefix: list(found.values()) for prefix, found in panels.items()}


def workspace(project: str, entity: str, name: str) -> Any:
    """Return the definition of the workspace; nothing is sent."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    def lines(names: list[str], **options: Any) -> Any:
        return wr.LinePlot(x=ITERATION, y=[*names], **options)

    def bars(figure: str) -> Any:
        sets = [*SET_TITLES, "overall"] if figure in OVERALL_FIGURES else [*SET_TITLES]
        return wr.BarPlot(title=figure, metrics=[f"eval/{name}/{figure}" for name in sets])

    panels = {f"{prefix}/": [lines(names) for names in found] for prefix, found in line_panels().items()}
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
