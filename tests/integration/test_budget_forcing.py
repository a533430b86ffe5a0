"""The engine of examples/budget_forcing.py lengthens or cuts the thoughts of a real small model."""

from __future__ import annotations

from pathlib import Path

import pytest
from budget_forcing import HFBudgetForcing
from commands import ROOT, run_rlt
from sampling import sample_groups

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.run.jsonl import read_json_rows
from rlt_lightning.types import Completion, InputError

CLOSE, OPENING = "</think>", "\n</think>\n\n<solution>\n"
QUESTIONS = ("start 4, times 3, add 5?", "start 2, add 3, times 3, add 1?")
GREEDY = Sampling(temperature=0, max_completion_length=96)


def ask(model: str, engine: HFEngine, sampling: Sampling = GREEDY) -> list[Completion]:
    tokenizer = load_tokenizer(model)
    chat = ChatFormat(tokenizer, "r1", student_system_prompt="")
    engine.start(load_model(model), tokenizer, Path())
    prompts = [chat.build_student_problem(1, question, "").teacher_prompt for question in QUESTIONS]
    groups = sample_groups(engine, prompts, sampling, 2, "", [1, 2])
    return [completion for group in groups for completion in group]


def force(num_waits: int, max_thinking_tokens: int = 96) -> HFBudgetForcing:
    return HFBudgetForcing(num_waits, max_thinking_tokens, CLOSE, OPENING)


def text(model: str, completion: Completion) -> str:
    decoded: str = load_tokenizer(model).decode(completion.token_ids)
    return decoded


def test_without_waits_and_cap_responses_stay_the_same(miniature: str) -> None:
    plain, forced = ask(miniature, HFEngine()), ask(miniature, force(0))
    assert [c.token_ids for c in forced] == [c.token_ids for c in plain]
    assert [c.finish_reason for c in forced] == [c.finish_reason for c in plain] == ["eos"] * 4


def test_wait_takes_the_place_of_the_closing_tag(miniature: str) -> None:
    plain, waited = ask(miniature, HFEngine()), ask(miniature, force(1, 70))
    for short, long in zip(plain, waited, strict=True):
        thought = text(miniature, short).partition(CLOSE)[0]
        longer, tag, _ = text(miniature, long).partition(CLOSE)
        assert longer.startswith(f"{thought}Wait")
        assert longer.count("Wait") == 1
        assert tag or long.finish_reason == "eos"  # a thought may end with the turn
    assert text(miniature, ask(miniature, force(2))[0]).count("Wait") == 2


def test_a_thought_that_is_too_long_is_cut_and_answered(miniature: str) -> None:
    plain, cut = ask(miniature, HFEngine()), ask(miniature, force(2, max_thinking_tokens=6))
    for short, long in zip(plain, cut, strict=True):
        assert long.token_ids[:6] == short.token_ids[:6]
        tokens = load_tokenizer(miniature)
        assert tokens.decode(long.token_ids[6:]).startswith(OPENING)
        assert "boxed" in text(miniature, long)
        assert len(long.token_ids) <= GREEDY.max_completion_length


def test_a_forced_response_depends_on_its_seed(miniature: str) -> None:
    sampling = Sampling(temperature=0.9, max_completion_length=60)
    one, again = ask(miniature, force(1, 40), sampling), ask(miniature, force(1, 40), sampling)
    assert [c.token_ids for c in one] == [c.token_ids for c in again]
    assert one[0].token_ids != one[1].token_ids
    assert max(len(c.token_ids) for c in one) <= 60


def test_training_is_refused(miniature: str) -> None:
    with pytest.raises(InputError, match=r"Set rollouts\.engine"):
        list(force(1).sample([], GREEDY, stop="</explanation>"))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_evaluation_runs_with_it(processes: int, tmp_path: Path) -> None:
    words = ["test", "--config=laptop/evaluate", "--data.max_rows=6", f"--output_dir={tmp_path}"]
    words += ["--rollouts.engine=budget_forcing.HFBudgetForcing", f"--rollouts.engine.thought_close={CLOSE}"]
    words += [f"--rollouts.engine.answer_opening={OPENING}", "--rollouts.engine.num_waits=1"]
    words += ["--data.batch_size=2", f"--trainer.devices={processes}"]
    words += ["--config=hardware/fsdp2"] if processes > 1 else []
    run_rlt(*words, PYTHONPATH=str(ROOT / "examples"))
    rows = [*read_json_rows(tmp_path / "responses.jsonl")]
    assert len(rows) == 6
    assert all("Wait" in row["response"] for row in rows)
