"""Budget forcing: a real small model thinks longer, or is cut, by exactly the tokens that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sampling import sample_groups

from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.engines import (
    BudgetedCompletion,
    BudgetForcing,
    HFEngine,
    SampleRequest,
    Sampling,
    WorkersLost,
    sample_with_budget,
)
from rlt_lightning.models.load import load_model, load_tokenizer
from rlt_lightning.types import Completion

SYSTEM_PROMPT = (
    "Think between {thought_open} and {thought_close}, then answer between {solution_open} and "
    "{solution_close}. Example:\n{thought_open}\n2 and 2 make 4.\n{thought_close}\n\n"
    "{solution_open}\n4\n{solution_close}"
)
SHORT = Sampling(temperature=0, max_completion_length=96)
CLOSE = "</think>"
CUT = "\n</think>\n\n<solution>\n"


@pytest.fixture(scope="module")
def engine(smollm2: str) -> HFEngine:
    engine = HFEngine()
    engine.start(load_model(smollm2), load_tokenizer(smollm2), Path())
    return engine


@pytest.fixture(scope="module")
def chat_format(engine: HFEngine) -> ChatFormat:
    return format_of(engine)


def format_of(engine: HFEngine) -> ChatFormat:
    return ChatFormat(engine.tokenizer, "r1", student_system_prompt=SYSTEM_PROMPT)


def prompt_of(chat_format: ChatFormat, question: str = "What is 3 + 4?") -> list[int]:
    return chat_format.build_student_problem(1, question, "").teacher_prompt + chat_format.thought_opening


def respond(
    engine: Any,
    chat_format: ChatFormat,
    budget: BudgetForcing,
    sampling: Sampling = SHORT,
    questions: tuple[str, ...] = ("What is 3 + 4?",),
    num_completions: int = 1,
    seeds: tuple[int, ...] = (0,),
) -> list[list[BudgetedCompletion]]:
    groups = sample_with_budget(
        engine,
        chat_format.tokenizer,
        [prompt_of(chat_format, question) for question in questions],
        sampling,
        num_completions,
        list(seeds),
        budget,
        CLOSE,
        chat_format.answer_opening,
    )
    for response in (response for group in groups for response in group):
        assert len(response.token_ids) <= sampling.max_completion_length
        assert response.log_probs is None or len(response.log_probs) == len(response.token_ids)
    return groups


def text(chat_format: ChatFormat, token_ids: list[int]) -> str:
    decoded: str = chat_format.tokenizer.decode(token_ids)
    return decoded


def encode(chat_format: ChatFormat, words: str) -> list[int]:
    token_ids: list[int] = chat_format.tokenizer(words, add_special_tokens=False)["input_ids"]
    return token_ids


# A real model


@pytest.mark.full
def test_without_a_budget_the_model_thinks_and_answers_as_it_does_alone(
    engine: HFEngine, chat_format: ChatFormat
) -> None:
    [[response]] = respond(engine, chat_format, BudgetForcing())
    [[free]] = sample_groups(engine, [prompt_of(chat_format)], SHORT, 1, "", [0])
    assert response.token_ids == free.token_ids
    assert response.log_probs == pytest.approx(free.log_probs, abs=1e-3)
    thought = text(chat_format, response.token_ids[: response.num_thinking_tokens])
    assert thought == "3 + 4 equals 7.\n"
    assert (response.num_waits, response.cut, response.finish_reason) == (0, False, free.finish_reason)


@pytest.mark.full
def test_a_minimum_lengthens_the_thought(engine: HFEngine, chat_format: ChatFormat) -> None:
    [[free]] = respond(engine, chat_format, BudgetForcing())
    sampling = Sampling(temperature=0, max_completion_length=400)
    budget = BudgetForcing(min_thinking_tokens=40, max_waits=20)
    [[longer]] = respond(engine, chat_format, budget, sampling)
    assert free.num_thinking_tokens < 40 <= longer.num_thinking_tokens
    assert 0 < longer.num_waits < 20  # the minimum ended it, not the waits
    thought = longer.token_ids[: longer.num_thinking_tokens]
    assert thought[: free.num_thinking_tokens] == free.token_ids[: free.num_thinking_tokens]
    assert text(chat_format, thought).startswith("3 + 4 equals 7.\nWait")
    assert text(chat_format, thought).count("Wait") >= longer.num_waits
    assert CLOSE not in text(chat_format, thought)
    assert not longer.cut


@pytest.mark.full
def test_a_thought_that_has_waited_often_enough_may_end_short(
    engine: HFEngine, chat_format: ChatFormat
) -> None:
    sampling = Sampling(temperature=0, max_completion_length=400)
    budget = BudgetForcing(min_thinking_tokens=100, max_waits=1)
    [[response]] = respond(engine, chat_format, budget, sampling)
    assert response.num_waits == 1
    assert response.num_thinking_tokens < 100


def test_a_maximum_cuts_the_thought_and_opens_the_solution(tiny_model: str) -> None:
    engine = HFEngine()  # of random weights, whose thoughts do not end by themselves
    engine.start(load_model(tiny_model), load_tokenizer(tiny_model), Path())
    chat_format = format_of(engine)
    [[free]] = respond(engine, chat_format, BudgetForcing(), replace(SHORT, max_completion_length=8))
    budget = BudgetForcing(max_thinking_tokens=4, min_answer_tokens=16)
    [[response]] = respond(engine, chat_format, budget, replace(SHORT, max_completion_length=40))
    assert response.cut
    assert response.num_thinking_tokens == 4 < free.num_thinking_tokens
    assert response.token_ids[:4] == free.token_ids[:4]
    opening = chat_format.answer_opening
    assert text(chat_format, opening) == CUT
    assert response.token_ids[4 : 4 + len(opening)] == opening
    assert len(response.token_ids) > 4 + len(opening)  # an answer follows
    assert response.log_probs is not None
    appended = [i for i, log_prob in enumerate(response.log_probs) if log_prob is None]
    assert appended == list(range(4, 4 + len(opening)))  # all others were sampled


@pytest.mark.full
def test_a_minimum_and_a_maximum_hold_together(engine: HFEngine, chat_format: ChatFormat) -> None:
    budget = BudgetForcing(20, 24, max_waits=20, min_answer_tokens=16)
    groups = respond(
        engine,
        chat_format,
        budget,
        Sampling(temperature=0.7, max_completion_length=64),
        ("What is 3 + 4?", "What is the capital of France?"),
        num_completions=2,
        seeds=(1, 2),
    )
    lengths = [response.num_thinking_tokens for group in groups for response in group]
    assert all(20 <= length <= 24 for length in lengths), lengths
    for response in (response for group in groups for response in group):
        ending = text(chat_format, response.token_ids[response.num_thinking_tokens :])
        assert CLOSE in ending or ending == "<|im_end|>"  # a thought that ends all, past the minimum
        assert response.cut == ending.startswith(CUT)


@pytest.mark.slow
def test_a_response_depends_on_its_seed_and_number_alone(engine: HFEngine, chat_format: ChatFormat) -> None:
    budget = BudgetForcing(12, 30, max_waits=3, min_answer_tokens=16)
    sampling = Sampling(temperature=1.0, max_completion_length=64)
    questions = ("What is 3 + 4?", "What is the capital of France?")
    both = respond(engine, chat_format, budget, sampling, questions, num_completions=4, seeds=(1, 2))
    [alone] = respond(engine, chat_format, budget, sampling, questions[1:], num_completions=2, seeds=(2,))
    assert [r.token_ids for r in both[1][:2]] == [r.token_ids for r in alone]
    histories = {r.num_waits for group in both for r in group}, {r.cut for group in both for r in group}
    assert len(histories[0]) > 1, "rows with different numbers of waits have been in one batch"
    assert len({tuple(r.token_ids) for group in both for r in group}) > 4


# Endings that a script decides


class Scripted:
    """An engine that says what it was told, text by text, and keeps what it was asked."""

    def __init__(self, chat_format: ChatFormat, *texts: str) -> None:
        self.chat_format = chat_format
        self.texts = list(texts)
        self.asked: list[tuple[list[int], str, int]] = []
        self.policy_version = 0
        self.losses = 0  # calls in which all workers are lost
        self.health_checks = 0

    def health(self) -> None:
        self.health_checks += 1

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        if self.losses:
            self.losses -= 1
            raise WorkersLost("No worker is left.")
        for index, request in enumerate(requests):
            limit = request.limit(sampling)
            self.asked.append((request.prompt, stop, limit))
            words = self.texts.pop(0)
            ids = encode(self.chat_format, words)
            reason: Any = "stop" if stop and words.endswith(stop) else "eos" if "<|im_end|>" in words else ""
            if not reason or len(ids) > limit:
                ids, reason = ids[:limit], "length"
            yield index, Completion(ids, None, reason)


def scripted(
    chat_format: ChatFormat, budget: BudgetForcing, *texts: str, max_completion_length: int = 64
) -> tuple[BudgetedCompletion, Scripted]:
    engine = Scripted(chat_format, *texts)
    [[response]] = respond(engine, chat_format, budget, Sampling(max_completion_length=max_completion_length))
    assert not engine.texts
    return response, engine


def test_an_answer_gets_what_the_thought_has_left(chat_format: ChatFormat) -> None:
    response, engine = scripted(chat_format, BudgetForcing(), "One.\n</think>", "\n\nTwo<|im_end|>")
    thought = encode(chat_format, "One.\n</think>")
    assert response.token_ids == thought + encode(chat_format, "\n\nTwo<|im_end|>")
    assert [(stop, limit) for _, stop, limit in engine.asked] == [(CLOSE, 64), ("", 64 - len(thought))]
    assert engine.asked[1][0] == prompt_of(chat_format) + thought
    assert response.finish_reason == "eos"
    assert response.log_probs is None  # the engine knows none


def test_wait_takes_the_place_of_a_closing_tag_and_of_an_end_of_sequence(chat_format: ChatFormat) -> None:
    budget = BudgetForcing(min_thinking_tokens=10, min_answer_tokens=8)
    said = ("One.\n</think>", " two.<|im_end|>", " three four five six seven.\n</think>", "x<|im_end|>")
    response, _ = scripted(chat_format, budget, *said)
    written = "One.\nWait two.Wait three four five six seven.\n</think>x<|im_end|>"
    assert text(chat_format, response.token_ids) == written
    assert response.num_waits == 2
    thought = response.token_ids[: response.num_thinking_tokens]
    assert text(chat_format, thought) == written[: written.index(CLOSE)]


def test_a_thought_that_ends_the_sequence_past_the_minimum_has_no_answer(chat_format: ChatFormat) -> None:
    response, engine = scripted(chat_format, BudgetForcing(), "One.<|im_end|>")
    assert response.finish_reason == "eos"
    assert text(chat_format, response.token_ids) == "One.<|im_end|>"
    assert response.num_thinking_tokens == len(response.token_ids) - 1
    assert len(engine.asked) == 1


def test_a_thought_that_fills_everything_without_a_maximum_is_not_cut(chat_format: ChatFormat) -> None:
    response, _ = scripted(chat_format, BudgetForcing(), "a b c d e f g h", max_completion_length=4)
    assert (response.finish_reason, response.cut, response.num_thinking_tokens) == ("length", False, 4)


def test_a_closing_tag_that_takes_the_last_token_leaves_no_answer(chat_format: ChatFormat) -> None:
    said = "One.\n</think>"
    limit = len(encode(chat_format, said))
    response, engine = scripted(chat_format, BudgetForcing(), said, max_completion_length=limit)
    assert response.finish_reason == "length"
    assert len(engine.asked) == 1


def test_each_response_keeps_to_its_own_limit(chat_format: ChatFormat) -> None:
    engine = Scripted(chat_format, "a b c d e f g h", "One.\n</think>", "a b c d e f g h")
    prompts, thought = (
        [prompt_of(chat_format), prompt_of(chat_format, "?")],
        encode(chat_format, "One.\n</think>"),
    )
    [[short], [long]] = sample_with_budget(
        engine,  # type: ignore[arg-type]
        chat_format.tokenizer,
        prompts,
        SHORT,
        1,
        [0, 1],
        BudgetForcing(),
        CLOSE,
        chat_format.answer_opening,
        limits=[3, len(thought) + 2],
    )
    assert (len(short.token_ids), short.finish_reason) == (3, "length")
    assert long.token_ids[:-2] == thought
    assert [limit for *_, limit in engine.asked] == [3, len(thought) + 2, 2]


def test_a_thought_that_closes_just_in_time_is_not_cut(chat_format: ChatFormat) -> None:
    longest = len(encode(chat_format, "One two.\n"))
    budget = BudgetForcing(max_thinking_tokens=longest, min_answer_tokens=8)
    response, _ = scripted(chat_format, budget, "One two.\n</think>", "x<|im_end|>")
    assert (response.num_thinking_tokens, response.cut) == (longest, False)
    budget = BudgetForcing(max_thinking_tokens=longest - 1, min_answer_tokens=8)
    response, _ = scripted(chat_format, budget, "One two.\n</think>", "x<|im_end|>")
    assert (response.num_thinking_tokens, response.cut) == (longest - 1, True)
    assert text(chat_format, response.token_ids) == "One two." + CUT + "x<|im_end|>"


def test_no_wait_is_appended_where_no_thought_could_follow(chat_format: ChatFormat) -> None:
    longest = len(encode(chat_format, "One two.\n")) + len(encode(chat_format, "Wait"))
    budget = BudgetForcing(longest, longest, min_answer_tokens=8)
    response, _ = scripted(chat_format, budget, "One two.\n</think>", "x<|im_end|>")
    assert response.num_waits == 0
    assert text(chat_format, response.token_ids) == "One two.\n</think>x<|im_end|>"


def test_lost_workers_are_waited_for(chat_format: ChatFormat) -> None:
    engine = Scripted(chat_format, "One.\n</think>", "x<|im_end|>")
    engine.losses = 2
    [[response]] = respond(engine, chat_format, BudgetForcing())
    assert text(chat_format, response.token_ids) == "One.\n</think>x<|im_end|>"
    assert engine.health_checks == 2
    engine.losses, engine.policy_version = 1, -1
    with pytest.raises(WorkersLost):  # they need a push
        respond(engine, chat_format, BudgetForcing())


@pytest.mark.parametrize("tags", ["stratos", "r1"])
def test_appended_tags_are_tokenised_as_in_training_text(chat_format: ChatFormat, tags: str) -> None:
    other = ChatFormat(chat_format.tokenizer, tags)
    separator, style = other.tags.separator, other.tags
    body = f"{separator}A{separator}"
    example = other.build_student_sft_example(1, "Q", body, body).token_ids
    thought, answer = other.thought_opening, other.answer_opening
    assert text(other, thought) == style.thought_open + separator
    assert text(other, answer) == f"{separator}{style.thought_close}\n\n{style.solution_open}{separator}"
    prompt = other.build_student_problem(1, "Q", "").teacher_prompt
    begin = len(prompt) + len(thought) + 1
    assert example[: begin - 1] == prompt + thought
    assert example[begin : begin + len(answer)] == answer
