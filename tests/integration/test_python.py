"""Use from Python: a script equals the command line; rows in memory; the notebook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import full
from commands import ROOT, run_python, run_rlt
from fits import metrics
from lightning.pytorch import Callback
from miniatures import SEED1

import rlt_lightning
from rlt_lightning import (
    RLTModule,
    RLTReward,
    Sampling,
    StratosDataModule,
    Teacher,
    TeacherRLData,
    TeacherSFTData,
    Trainer,
)
from rlt_lightning.callbacks import Checkpoint, ModelExporter, RolloutCallback
from rlt_lightning.checkpoints.run_folder import RunFolder
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.modules import SFTModule
from rlt_lightning.types import InputError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PAGE = (ROOT / "docs" / "extend.md").read_text()
SHOWN = dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
# The same run by script and by command.
SCRIPT = """
from rlt_lightning import OptimizerConfig, RLTModule, RolloutCallback, Sampling, TeacherRLData, Trainer
from rlt_lightning.callbacks import Checkpoint, ReferenceSync

optimizer = OptimizerConfig(lr=2e-4, scheduler="linear", warmup_frac=0.1)
module = RLTModule("miniature-teacher", "miniature", optimizer=optimizer, micro_batch_tokens=4096)
data = TeacherRLData("chains", num_embedded_rows=24, prompts_per_step=8, student_system_prompt="")
callbacks = [
    RolloutCallback(sampling=Sampling(temperature=0.7, max_completion_length=48)),
    ReferenceSync(),
    Checkpoint(every_n_train_steps=1),
]
trainer = Trainer("runs/teacher", max_steps=3, accelerator="cpu", callbacks=callbacks, devices=1)
trainer.fit(module, data)
"""
COMMAND = ["fit", "--config", str(ROOT / "configs" / "laptop" / "rlt.yaml")]
COMMAND += ["--model.teacher=miniature-teacher", "--data.num_embedded_rows=24", "--trainer.max_steps=3"]
COMMAND += ["--checkpoint.every_n_train_steps=1", "--output_dir=runs/teacher"]
CHAINS: dict[str, Any] = {"tags": "r1", "teacher_system_prompt": "", "student_system_prompt": ""}


def files(run: Path) -> dict[str, bytes]:
    """What a run has computed, by file."""
    suffixes = (".safetensors", ".jsonl", ".md", ".json")
    found = [path for path in sorted(run.rglob("*")) if path.suffix in suffixes]
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


@pytest.mark.docs
@pytest.mark.parametrize("devices", [1, full(2)])
def test_a_script_equals_the_command(devices: int, tmp_path: Path) -> None:
    folders = tmp_path / "script", tmp_path / "command"
    for folder in folders:
        folder.mkdir()
    (folders[0] / "run.py").write_text(SCRIPT.replace("devices=1", f"devices={devices}"))
    # A second process runs the file again.
    done = subprocess.run([sys.executable, "run.py"], cwd=folders[0], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    run_rlt(*COMMAND, f"--trainer.devices={devices}", cwd=folders[1])
    script, command = (folder / "runs" / "teacher" for folder in folders)
    assert files(script) == files(command)
    assert metrics(script) == metrics(command)


@pytest.mark.docs
def test_the_scripts_of_the_page_run(tmp_path: Path, tiny_model: str) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    for name in ("teach.py", "ask.py"):
        code = SHOWN[name].replace("smollm2-135m", tiny_model)
        done = run_python(code, tmp_path, WANDB_MODE="offline")
        assert "Warning" not in done.stderr, done.stderr


def own_rows() -> list[dict[str, Any]]:
    return [row for _, row in read_rows("chains", num_embedded_rows=12) if isinstance(row, dict)]


def trainer(folder: Path | RunFolder, steps: int = 2, **options: Any) -> Trainer:
    rollouts = RolloutCallback(sampling=Sampling(max_completion_length=8))
    callbacks = [rollouts, Checkpoint(every_n_train_steps=1), *options.pop("callbacks", [])]
    return Trainer(folder, max_steps=steps, accelerator="cpu", callbacks=callbacks, **options)


def module(**options: Any) -> RLTModule:
    return RLTModule("miniature", "miniature", group_size=2, **options)


def data(**options: Any) -> StratosDataModule:
    return TeacherRLData(own_rows(), prompts_per_step=2, **CHAINS, **options)


class Draws(Callback):
    """Draws a random number in each step, as a module of one's own may."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.numbers.append(torch.rand(()).item())


def test_a_resumed_script_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = Draws(), Draws()
    trainer(tmp_path / "whole", 3, callbacks=[whole]).fit(module(), data())
    first: dict[str, Any] = {"limit_train_batches": 2, "max_epochs": 1, "callbacks": [parts]}
    trainer(tmp_path / "parts", 3, **first).fit(module(), data())
    with pytest.raises(InputError, match="must be empty or new"):
        trainer(tmp_path / "parts").fit(module(), data())
    trainer(tmp_path / "parts", 3, resume=True, callbacks=[parts]).fit(module(), data())
    assert parts.numbers == whole.numbers
    names = ("model/model.safetensors", "rollouts.jsonl")
    for name in names:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    trainer(tmp_path / "parts", 1, overwrite=True).fit(module(), data())
    assert len(metrics(tmp_path / "parts")) == 1


def test_further_verbs_keep_the_files_of_the_fit(tmp_path: Path) -> None:
    own, rows = trainer(tmp_path / "run", 1), data(val_rows=4)
    rlt_module = module()
    own.fit(rlt_module, rows)
    before = files(tmp_path / "run")
    for _ in range(2):
        [found] = own.validate(rlt_module, rows, verbose=False)
    assert "reward/val_mean" in found
    assert rows.output_dir is None
    after = files(tmp_path / "run")
    changed = {name for name in before if after[name] != before[name]}
    assert changed <= {"metrics.csv", "data_report.json"}
    assert [*metrics(tmp_path / "run")] == [1]


def test_a_given_callback_replaces_the_runs_own(tmp_path: Path) -> None:
    class Quiet(ModelExporter):
        pass

    own = trainer(tmp_path, callbacks=[Quiet()], enable_checkpointing=True)
    kinds = [type(callback) for callback in own.callbacks]  # type: ignore[attr-defined]
    assert kinds.count(RolloutCallback) == kinds.count(Checkpoint) == kinds.count(Quiet) == 1
    assert ModelExporter not in kinds
    with pytest.raises(InputError, match="one RolloutCallback, but callbacks has 2"):
        trainer(tmp_path, callbacks=[RolloutCallback()])


def test_data_follow_the_module_of_the_run(tmp_path: Path, tiny_model: str) -> None:
    rows = TeacherSFTData(own_rows(), prompts_per_step=4, max_length=2048)
    for number, name in enumerate(("miniature", tiny_model)):
        options: dict[str, Any] = {"max_steps": 1, "accelerator": "cpu", "enable_checkpointing": False}
        Trainer(tmp_path / str(number), **options).fit(SFTModule(name), rows)
        assert rows.tokenizer_name == name


def test_score_equals_predict(tmp_path: Path) -> None:
    rows = own_rows()
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"--data.source={path}", f"--model.teacher={SEED1}", "--model.student=miniature"]
    words += ["--distillation.per_token=true", "--trainer.accelerator=cpu"]
    run_rlt("predict", "--config=configs/recipe_7b/rank.yaml", *words, f"--output_dir={tmp_path / 'run'}")
    recorded = [json.loads(line) for line in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()]
    found = Teacher(SEED1, "miniature").score(rows)
    assert [own.reward for own in found] == [row["reward"] for row in recorded]
    for own, row in zip(found, recorded, strict=True):
        assert (own.tokens, own.solution_tokens) == (row["thought_tokens"], row["solution_tokens"])
        assert own.kl == pytest.approx(row["thought_kl"], abs=1e-6)
        assert own.solution_log_probs == pytest.approx(row["solution_log_probs"], abs=1e-6)
        mean, least = sum(own.solution_log_probs) / len(own.solution_log_probs), min(own.solution_log_probs)
        assert own.r_ss == pytest.approx(mean + 0.01 * least, abs=1e-5)
        assert own.r_kl == pytest.approx(sum(own.kl) / len(own.kl) + 0.01 * max(own.kl), abs=1e-5)
        assert own.reward == pytest.approx(own.r_ss - 3 * own.r_kl + own.terms["format"], abs=1e-5)
        assert own.reward == pytest.approx(sum(own.terms.values()), abs=1e-5)


def test_teacher_explains_as_the_command_does() -> None:
    question, solution = "start 4, times 3, times 3, add 1, add 1, add 5?", "\\boxed{3}"
    words = ["--question", question, "--solution", solution, "--seed=3", "--student=miniature"]
    words += ["--sampling.max_completion_length=40", "--reward.kl_estimator=k1"]
    done = run_rlt("explain", "miniature", *words)
    sampling = Sampling(max_completion_length=40)
    teacher = Teacher("miniature", "miniature", reward=RLTReward(), sampling=sampling)
    found = teacher.explain(question, solution, seed=3)
    assert f"\n{found.text.strip()}\n" in done.stdout
    assert found.score is not None
    assert f"reward        {found.score.reward:+.4f}\n" in done.stdout
    assert found == teacher.explain(question, solution, seed=3)
    assert found.text != teacher.explain(question, solution, seed=4).text


def test_a_teacher_without_a_student_explains_without_a_score() -> None:
    teacher = Teacher("miniature", sampling=Sampling(max_completion_length=8), accelerator="cpu")
    found = teacher.explain("start 4, add 3?", "<7>")
    assert found.score is None
    with pytest.raises(InputError, match="A score needs a student"):
        teacher.score([])


def test_every_name_of_the_package_can_be_imported() -> None:
    assert sorted(name for names in rlt_lightning.EXPORTS.values() for name in names) == rlt_lightning.__all__
    assert all(hasattr(rlt_lightning, name) for name in rlt_lightning.__all__)
    assert set(rlt_lightning.__all__) <= set(dir(rlt_lightning))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rlt_lightning.nothing


# The notebook

SMALLER = {  # its numbers, and those of the test
    "num_embedded_rows=2048": "num_embedded_rows=64",
    "num_embedded_rows=512": "num_embedded_rows=24",
    "max_steps=40": "max_steps=3",
    "max_rows=512": "max_rows=16",
    "prompts_per_step=64": "prompts_per_step=8",
    "batch_size=128": "batch_size=8",
}


def outputs(notebook: Any) -> list[str]:
    """The kinds of output of a notebook's cells."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = [output for cell in cells for output in cell["outputs"]]
    assert not [o for o in shown if o.get("name") == "stderr" and "Warning" in "".join(o["text"])]
    return [kind for output in shown for kind in output.get("data", {})]


@pytest.mark.docs
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra dev")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra dev")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        for name, value in SMALLER.items():
            cell.source = cell.source.replace(name, value)
    client = nbclient.NotebookClient(notebook, timeout=570, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    assert {"image/png", "text/plain"} <= set(outputs(notebook))
