"""`rlt dashboard`: a saved W&B workspace that shows every metric of docs/metrics.md."""

from __future__ import annotations

from typing import Any

from rlt_lightning.datamodules.evaluation_sets import SETS
from rlt_lightning.loggers.wandb_files import ITERATION
from rlt_lightning.loggers.wandb_logger import TABLE, account

# Every panel of lines, by section: those that are to be compared share one.
LINES: dict[str, tuple[tuple[str, ...], ...]] = {
    "reward": (
        ("reward/mean", "reward/val_mean"),
        ("reward/solution", "reward/val_solution"),
        ("reward/kl", "reward/val_kl"),
        ("reward/format", "reward/val_format"),
        ("reward/std", "reward/group_std"),
        ("reward/zero_std_groups",),
        ("reward/solution_log_prob_mean", "reward/solution_log_prob_min"),
        ("reward/kl_mean", "reward/kl_max"),
        ("reward/correct", "reward/val_correct"),
        ("reward/formatted", "reward/val_formatted"),
        ("reward/timed_out", "reward/val_timed_out"),
    ),
    "policy": (
        ("policy/loss", "policy/val_loss"),
        ("policy/entropy",),
        ("policy/kl_ref",),
        ("policy/ratio_mean",),
        ("policy/clip_frac",),
        ("policy/grad_norm",),
        ("policy/lr",),
    ),
    "student": (
        ("student/solution_log_prob_mean", "student/solution_log_prob_min"),
        ("student/kl_mean", "student/kl_max"),
    ),
    "rollout": (
        ("rollout/length_mean", "rollout/length_max", "rollout/val_length_mean"),
        ("rollout/closed_frac", "rollout/val_closed_frac"),
        ("rollout/truncated_frac", "rollout/empty_frac"),
        ("rollout/staleness",),
        ("rollout/mismatch_mean", "rollout/mismatch_max", "rollout/val_mismatch_max"),
        ("rollout/mismatch_kl",),
        ("rollout/effective_sample_frac",),
    ),
    "perf": (
        ("perf/tokens_per_s",),
        ("perf/generate_tokens_per_s", "perf/score_tokens_per_s", "perf/train_tokens_per_s"),
        ("perf/generate_peak_gib", "perf/push_peak_gib", "perf/score_peak_gib", "perf/train_peak_gib"),
        ("perf/mfu",),
        ("perf/peak_tflops",),
        ("perf/padding_frac", "perf/shared_frac"),
    ),
    "data": (("data/completion_tokens",), ("data/epoch",)),
}
PHASES = ("perf/generate_s", "perf/push_s", "perf/score_s", "perf/train_s")  # stacked: a whole iteration
FIGURES = (  # of each evaluation set
    "pass_at_1",
    "standard_error",
    "pass_at_k",
    "maj_at_k",
    "formatted_frac",
    "timed_out_frac",
    "truncated_frac",
    "tokens_mean",
    "num_problems",
)
OVERALL = FIGURES[:4]  # what there is over all sets too


def dashboard(project: str, entity: str | None = None, name: str = "rlt_lightning") -> None:
    """Save a workspace in a W&B project, with every metric by iteration, and print its address.

    Args:
        project: Where the runs are logged, as in trainer.logger.
        entity: User or team; None: the account's default.
        name: Of the workspace; each saving makes a new one.
    """
    with account() as api:
        workspace(project, entity or api.default_entity, name).save()


def workspace(project: str, entity: str, name: str) -> Any:
    """The definition of the workspace; nothing is sent."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    def lines(names: tuple[str, ...], **options: Any) -> Any:
        return wr.LinePlot(x=ITERATION, y=list(names), **options)

    def bars(figure: str) -> Any:
        sets = [*SETS, "overall"] if figure in OVERALL else [*SETS]
        return wr.BarPlot(title=figure, metrics=[f"eval/{name}/{figure}" for name in sets])

    panels = {f"{prefix}/": [lines(names) for names in found] for prefix, found in LINES.items()}
    panels["perf/"].insert(0, lines(PHASES, title="seconds of an iteration", plot_type="stacked-area"))
    panels["eval/"] = [bars(figure) for figure in FIGURES]
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
