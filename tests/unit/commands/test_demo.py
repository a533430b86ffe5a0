"""`rlt demo`: what it refuses, the order of its stages, and what it prints. test_install.py runs it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rows_of import read, write_rows

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
    stages = {stage.name: stage for stage in demo.list_stages()}
    for stage in stages.values():
        texts = [word.strip('[]"') for word in stage.list_words(tmp_path)]
        paths = [Path(text) for text in texts if text.startswith(str(tmp_path))]
        read = {"/".join(path.relative_to(tmp_path).parts[:2]) for path in paths} - {stage.name}
        needed = [stage.needs] if stage.needs else []
        while needed and (before := stages[needed[-1]].needs):
            needed.append(before)
        assert {*needed[:1]} <= read & stages.keys() <= {*needed}, stage


def test_every_way_samples_as_much_as_rlt() -> None:
    read = {name: yaml.safe_load(path.read_text()) for name, path in list_shipped_configs().items()}

    def count(config: str, num_steps: int) -> int:
        model, data = (read[config][section]["init_args"] for section in ("model", "data"))
        return int(num_steps * data["prompts_per_step"] * model["group_size"])

    num_sampled = demo.NUM_CANDIDATES * demo.NUM_ROWS
    assert count("laptop/rlt", demo.NUM_ITERATIONS) + demo.NUM_ROWS == num_sampled
    assert count("laptop/grpo", demo.NUM_REWARDED) == num_sampled


def test_the_best_are_those_with_the_highest_reward(tmp_path: Path) -> None:
    rows = [{"row": i // 3, "trace": i % 3, "reward": -i / 1000} for i in range(3 * demo.NUM_ROWS)]
    write_rows(tmp_path / "traces.jsonl", rows)
    demo.choose_traces(tmp_path)
    before, best, expert = (read(tmp_path / f"{name}.jsonl") for name in ("before", "best", "expert"))
    assert before == rows[::3]
    assert best == rows[:256]
    # Two of each row, above -0.7: rows 0 to 232 have both, row 233 only its first.
    assert expert == [row for row in rows[:700] if row["trace"] < 2]
