"""`rlt demo`: what it refuses, the order of its stages, and what it prints. test_install.py runs it."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlt_lightning.commands import demo
from rlt_lightning.commands.demo import Stage
from rlt_lightning.run.shipped import list_shipped_configs
from rlt_lightning.types import InputError


def build_stage(name: str, needs: str = "", what: str = "end") -> Stage:
    """Return a stage that `pretend` runs."""
    return Stage(name, needs, f"{name} has ended", what)


def pretend(words: list[str], log: Path) -> None:
    """Write down that a stage begins; then end, fail or hang, as its words say."""
    what = words[0]
    with (log.parent / "order").open("a") as order:
        order.write(f"{log.stem}\n")
    log.write_text("gone\n")
    if what == "hang":
        time.sleep(200)
    sys.exit(3 if what == "fail" else 0)


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `pretend` stand for `rlt`, side by side on two cores."""
    monkeypatch.setattr(demo, "run_rlt", pretend)
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def test_stages_wait_for_what_they_need(tmp_path: Path, capsys: Any) -> None:
    needs = {"c": "b", "b": "a", "a": ""}
    demo.run_stages([build_stage(name, need) for name, need in needs.items()], tmp_path)
    assert (tmp_path / "order").read_text().split() == ["a", "b", "c"]
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["a", "b", "c"]


def test_a_failure_names_its_log_and_ends_the_others(tmp_path: Path) -> None:
    stages = [build_stage("a", what="hang"), build_stage("b", what="fail")]
    begin = time.perf_counter()
    with pytest.raises(InputError, match=r"ended with 3\. .* log, .*b\.log"):
        demo.run_stages(stages, tmp_path)
    assert time.perf_counter() - begin < 100


def test_every_stage_reads_what_one_before_it_writes(tmp_path: Path) -> None:
    stages = {stage.name: stage for stage in demo.list_stages(tmp_path)}
    for stage in stages.values():
        words = shlex.split(stage.command)
        paths = [Path(word) for word in words if word.startswith(str(tmp_path))]
        read = {"/".join(path.relative_to(tmp_path).parts[:2]) for path in paths} - {stage.name}
        assert read & stages.keys() == {stage.needs} - {""}, stage


def test_the_best_are_chosen_from_as_many_explanations_as_rlt_samples() -> None:
    [config] = [path for name, path in list_shipped_configs().items() if name == "laptop/rlt"]
    options = yaml.safe_load(config.read_text())
    model, data = (options[section]["init_args"] for section in ("model", "data"))
    assert options["trainer"]["max_steps"] == demo.NUM_ITERATIONS
    num_sampled = demo.NUM_ITERATIONS * data["prompts_per_step"] * model["group_size"]
    assert num_sampled + demo.NUM_EXPLAINED == demo.NUM_CANDIDATES * demo.NUM_EXPLAINED
