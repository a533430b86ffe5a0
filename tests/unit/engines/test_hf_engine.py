"""The in-process engine on a real small model: seeded, exact log-probs, every option and every ending."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import rlt
from fits import small_fit
from sampling import sample_groups
from tiny import CHAINS

from rlt_lightning.engines import HFEngine, Sampling
from rlt_lightning.engines.hf import draw
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.tags import StopWatcher
from rlt_lightning.types import Completion

END = "<|end_of_explanation|>"


@pytest.fixture(scope="module")
def engine(miniature: str) -> HFEngine:
    engine = HFEngine()
    engine.start(load_model(miniature), load_tokenizer(miniature), Path())
    return engine


def prompts_of(engine: HFEngine) -> list[list[int]]:
    questions = ["What is 3 + 4?", "Name the capital of France, and say in one sentence where it lies."]
    return [
        engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]


def token_ids(groups: list[list[Completion]]) -> list[list[int]]:
    return [completion.token_ids for group in groups for completion in group]


def test_log_probs_are_the_models_own_at_the_sampling_temperature(engine: HFEngine) -> None:
    prompts = prompts_of(engine)
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=50, max_completion_length=12)
    for prompt, group in zip(prompts, sample_groups(engine, prompts, sampling, 3, END, [1, 2]), strict=True):
        for completion in group:
            with torch.no_grad():
                logits = engine.model(torch.tensor([prompt + completion.token_ids])).logits[0] / 0.7
            expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_a_completion_depends_on_its_seed_and_not_on_its_neighbours(engine: HFEngine) -> None:
    prompts, sampling = prompts_of(engine), Sampling(max_completion_length=10)
    together = sample_groups(engine, prompts, sampling, 2, END, [5, 6])
    alone = sample_groups(engine, prompts[1:], sampling, 2, END, [6])
    assert token_ids([together[1]]) == token_ids(alone)
    in_turns = HFEngine(max_sequences=2)
    in_turns.start(engine.model, engine.tokenizer, Path())
    assert token_ids(sample_groups(in_turns, prompts, sampling, 2, END, [5, 6])) == token_ids(together)
    other = sample_groups(engine, prompts, sampling, 2, END, [7, 8])
    assert token_ids(other) != token_ids(together)
    assert token_ids([together[0]])[0] != token_ids([together[0]])[1]  # one group, two streams


def test_sampling_stops_with_the_token_in_which_the_end_tag_ends(engine: HFEngine) -> None:
    # Greedy decoding repeats itself: it ends where a piece of the first answer is the stop string.
    prompt, greedy = prompts_of(engine)[1], Sampling(temperature=0, max_completion_length=8)
    [[free]] = sample_groups(engine, [prompt], greedy, 1, END, [0])
    text = engine.tokenizer.decode(free.token_ids[:4])
    [[stopped]] = sample_groups(engine, [prompt], greedy, 1, text[-6:], [0])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert text[-6:] in engine.tokenizer.decode(stopped.token_ids)
    assert text[-6:] not in engine.tokenizer.decode(stopped.token_ids[:-1])


def test_an_end_tag_whose_last_character_spans_tokens_is_seen(engine: HFEngine) -> None:
    for tag in ("⟦/解⟧", "【终】", "«fin»"):
        watcher = StopWatcher(engine.tokenizer, tag, set())
        ids = engine.tokenizer("So it is done." + tag, add_special_tokens=False).input_ids
        reasons = [watcher.finish_reason(ids[: n + 1]) for n in range(len(ids))]
        assert reasons == ["length"] * (len(ids) - 1) + ["stop"]


def test_draw_follows_the_truncated_distribution() -> None:
    # p = 0.5, 0.3, 0.2; top_k 2 leaves 0.625 and 0.375. 4000 even spaced numbers make the counts exact to
    # one.
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(4000, 3)
    uniforms = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    history = torch.zeros(4000, 1, dtype=torch.long)
    tokens, _, log_probs = draw(logits, history, uniforms, Sampling(temperature=1, top_k=2))
    assert Counter(tokens.tolist()) == {0: 2500, 1: 1500}
    assert log_probs[0] == pytest.approx(math.log(0.5))  # of the full distribution
    tokens, *_ = draw(logits, history, uniforms, Sampling(temperature=1, top_p=0.4))
    assert set(tokens.tolist()) == {0}
    tokens, *_ = draw(logits, history, uniforms, Sampling(temperature=1, min_p=0.5))
    assert set(tokens.tolist()) == {0, 1}
    # Temperature 0.5 squares: 0.25, 0.09, 0.04 of 0.38.
    tokens, _, log_probs = draw(logits, history, uniforms, Sampling(temperature=0.5))
    assert Counter(tokens.tolist())[0] == pytest.approx(4000 * 25 / 38, abs=1)
    assert log_probs[0] == pytest.approx(math.log(25 / 38))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 0}])
def test_rows_without_a_token_are_never_drawn(options: dict[str, Any]) -> None:
    logits = torch.tensor([[0.3, 0.2, 0.5]]).log().expand(100, 3)  # the last row has no token
    uniforms = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    drawn = draw(logits, torch.zeros(100, 0, dtype=torch.long), uniforms, Sampling(**options), num_ids=2)
    assert set(drawn.token_ids) <= {0, 1}
    if not options:
        assert drawn.log_probs[0] < math.log(0.4)  # of all words, as the trainer's


def test_engine_leaves_the_models_mode_as_it_was(tiny_model: str) -> None:
    engine = HFEngine()
    engine.start(load_model(tiny_model).train(), load_tokenizer(tiny_model), Path())
    sample_groups(engine, [[5, 6, 7]], Sampling(max_completion_length=2), 1, END, [0])
    assert engine.model.training


def test_a_student_with_fewer_rows_reads_a_padded_teacher(miniature: str, tmp_path: Path) -> None:
    teacher, size = load_model(miniature), len(load_tokenizer(miniature))
    teacher.resize_token_embeddings(size + 32)
    with torch.no_grad():
        weight = teacher.get_input_embeddings().weight  # tied: such a row would be sampled most
        weight[size:] = 2 * weight[:size].mean(0) + weight[size - 32 : size]
    teacher.save_pretrained(tmp_path / "teacher")
    load_tokenizer(miniature).save_pretrained(tmp_path / "teacher")
    words = [*CHAINS, f"--model.student={miniature}", "--trainer.max_steps=1"]
    result = rlt(*small_fit(str(tmp_path / "teacher"), tmp_path / "run", *words))
    assert result.returncode == 0, result.stderr
