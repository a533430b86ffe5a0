"""Save a view of a W&B project that shows what to watch first, in the order of docs/metrics.md.

    pip install wandb-workspaces
    python examples/wandb_overview.py ENTITY/PROJECT    # prints the view's address

Runs come into the project by `--config add/wandb --trainer.logger.project PROJECT`. Held-out values stand
beside those of training. To show more, add names to SECTIONS; every call of this script saves another view.
"""

from __future__ import annotations

import sys
from typing import Any

NAME = "RLT overview"
STEP = "trainer/global_step"  # counts iterations; W&B's own Step counts what was sent
# Charts by section; the metrics of a chart stand together.
SECTIONS: dict[str, list[list[str]]] = {
    "Reward": [
        ["reward/mean", "reward/val_mean"],
        ["reward/solution", "reward/val_solution"],
        ["reward/kl", "reward/val_kl"],
        ["reward/group_std"],
    ],
    "Rollout": [
        ["rollout/closed_frac", "rollout/val_closed_frac"],
        ["rollout/truncated_frac"],
        ["rollout/length_mean"],
    ],
    "Policy": [
        ["policy/entropy"],
        ["policy/kl_ref"],
        ["policy/grad_norm"],
        ["policy/loss", "policy/val_loss"],
    ],
    "Perf": [
        ["perf/generate_s", "perf/push_s", "perf/score_s", "perf/train_s"],
        ["perf/tokens_per_s"],
        ["perf/generate_peak_gib", "perf/score_peak_gib", "perf/train_peak_gib"],
    ],
}
TABLE = "completions"  # of RolloutRecorder


def build_view(entity: str, project: str) -> Any:
    """Return the view: a section of charts for each of SECTIONS, and the table of completions."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=name, panels=[wr.LinePlot(x=STEP, y=names) for names in charts], is_open=True)
        for name, charts in SECTIONS.items()
    ]
    table = wr.WeavePanelSummaryTable(table_name=TABLE, layout=wr.Layout(w=24, h=12))
    sections.append(ws.Section(name="Samples", panels=[table], is_open=True))
    settings = ws.WorkspaceSettings(x_axis=STEP)
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections, settings=settings)


def main(place: str) -> None:
    """Save the view of a project, which is named as ENTITY/PROJECT."""
    try:
        view = build_view(*place.split("/"))
    except ImportError:
        sys.exit("This needs wandb-workspaces: pip install wandb-workspaces")
    view.save()  # prints the address


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].count("/") != 1:
        sys.exit("usage: python examples/wandb_overview.py ENTITY/PROJECT")
    main(sys.argv[1])
