"""Write the results of `rlt test`: every response, and the table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rlt_lightning.callbacks.responses import ResponseCallback
from rlt_lightning.datamodules.evaluation import evaluation_of
from rlt_lightning.datamodules.published import known_by_number
from rlt_lightning.judging.questions import EvaluationBatch
from rlt_lightning.modules.evaluation import EvaluationModule
from rlt_lightning.run.jsonl import append_rows, keep_rows, rewrite
from rlt_lightning.run.results import render, without_nan


class EvaluationWriter(Callback):
    """Append judged responses to `responses.jsonl`; at the end write `evaluation.json` and `.md`."""

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the problems that a kill left unfinished: they are sampled again."""
        path = Path(trainer.default_root_dir) / "responses.jsonl"
        data = evaluation_of(trainer)
        if isinstance(pl_module, EvaluationModule):
            done = {record["id"] for record in data.finished}
            keep_rows(path, lambda record: record["id"] in done)

    @override
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: EvaluationBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if isinstance(batch, EvaluationBatch):
            append_rows(Path(trainer.default_root_dir) / "responses.jsonl", batch.records)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, EvaluationModule):
            return
        folder = Path(trainer.default_root_dir)
        summary = summarise(trainer, pl_module)
        page = render(summary)
        rewrite(folder / "evaluation.md", [page])
        # This file is the last and appears in one step: it says that the stage is done.
        rewrite(folder / "evaluation.json", [json.dumps(summary, indent=1, ensure_ascii=False) + "\n"])
        print(f"\n{page}\n{folder / 'evaluation.json'}: these figures, with all settings")
        print(f"{folder / 'responses.jsonl'}: every response, judged")


def summarise(trainer: Trainer, module: EvaluationModule) -> dict[str, Any]:
    """Return the results of a run with all settings that they depend on, as plain data."""
    data = evaluation_of(trainer)
    sampler = next(c for c in trainer.callbacks if isinstance(c, ResponseCallback))  # type: ignore[attr-defined]
    figures = module.figures()
    sets: dict[str, Any] = {}
    for name, spec in data.specs.items():
        first = next(problem for problem in data.problems if problem.set_name == name)
        metrics: Any = module.sets[name]
        sets[name] = {
            **asdict(spec),
            # Only the published set bears its name.
            "title": spec.title if data.differences[name] is None else name,
            "differs": data.differences[name],
            "known_by_number": known_by_number(name),
            "num_samples": data.num_samples,
            **figures[name],
            "pass_at": metrics.pass_at_k(),
            "prompt": None if first.private or data.format is None else prompt_text(data, first.prompt),
        }
    given = data.responses is not None
    summary = {
        "model": None if given else module.pretrained,
        "responses": data.responses,
        "dtype": None if given else module.dtype_name,
        "data_seed": data.seed,
        "max_rows": data.max_rows,
        "rollouts": None if given else sampler.settings(),
        "sets": sets,
        "overall": figures.get("overall"),
    }
    return without_nan(summary)


def prompt_text(data: Any, token_ids: list[int]) -> str:
    """Return a prompt as the model sees it."""
    text: str = data.format.tokenizer.decode(token_ids, skip_special_tokens=False)
    return text
