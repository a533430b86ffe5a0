"""The usual pipelines: a model's own right answers, raw responses of another model, and filters of rows."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import rlt, start
from fits import assert_one_clear_line
from lightning.pytorch import Trainer
from rows_of import read, wait_until
from sampling import numbered

from rlt_lightning.callbacks import DistillationWriter, RolloutCallback
from rlt_lightning.callbacks.predictions import is_usable
from rlt_lightning.datamodules import (
    ScoringData,
    StratosDataModule,
    StudentRLData,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.datamodules.filters import Filters, Overlaps, split_words
from rlt_lightning.datamodules.rows import RawResponses, split_raw, split_response
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.engines import HFEngine, SampleRequest, Sampling
from rlt_lightning.modules import RLTModule
from rlt_lightning.rewards import CorrectnessReward
from rlt_lightning.tags import R1, STRATOS
from rlt_lightning.teacher import NoReward
from rlt_lightning.types import Completion, InputError

PROBLEMS, ANSWERS = 24, 4
SHORT = Sampling(max_completion_length=1000)


def rejection(folder: Path, *options: str) -> list[str]:
    """`rlt predict` of the miniature's own answers to last-digit chains: a few seconds."""
    return [
        *("predict", "--config=configs/laptop/rejection.yaml", f"--data.num_embedded_rows={PROBLEMS}"),
        *("--data.prompts_per_step=2", f"--rollouts.num_traces={ANSWERS}", "--distillation.select=all"),
        *(f"--output_dir={folder}", *options),
    ]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answered") / "run"
    result = rlt(*rejection(folder))
    assert result.returncode == 0, result.stderr
    assert "Next: rlt fit --config" in result.stdout
    assert "--config laptop/sft " in result.stdout
    assert "--model.pretrained" not in result.stdout  # the miniature, as that config has it
    return folder


def last_digit(question: str) -> str:
    """Work a chain out, with nothing of the package: every step is one operation on the last digit."""
    first, *steps = question.removesuffix("?").split(", ")
    value = int(first.removeprefix("start "))
    for step in steps:
        name, number = step.split()
        value = (value + int(number) if name == "add" else value * int(number)) % 10
    return str(value)


# A model's own right answers


def test_kept_answers_are_right(answered: Path) -> None:
    rows, kept = read(answered / "traces.jsonl"), read(answered / "distillation.jsonl")
    places = [(row["row"], row["trace"]) for row in rows]
    assert places == [(row, i) for row in range(1, PROBLEMS + 1) for i in range(ANSWERS)]
    for row in rows:
        boxed = re.search(r"\\boxed\{(.*?)\}", row["solution"])
        right = boxed is not None and boxed[1] == last_digit(row["question"])
        assert (row["correct"] == 1) == right
        assert row["answer"] == last_digit(row["question"])
        assert row["found_answer"] == (boxed and boxed[1])
        of_problem = [other["correct"] for other in rows if other["row"] == row["row"]]
        assert row["pass_rate"] == sum(of_problem) / ANSWERS
    assert 0 < len(kept) < len(rows)
    assert kept == [row for row in rows if row["correct"]]


def test_stage_4_learns_the_sampled_turn(answered: Path, miniature: str) -> None:
    kept = read(answered / "distillation.jsonl")
    for columns in (("question", "solution", "reasoning_trace"), ("system", "conversations")):
        source = answered.parent / f"{columns[0]}.jsonl"
        source.write_text("".join(json.dumps({name: row[name] for name in columns}) + "\n" for row in kept))
        data = student_data(source, miniature)
        for example, row in zip(data.examples, kept, strict=True):
            assert len(example.token_ids) == row["student_tokens"]
            turn = (
                f"<think>\n{row['reasoning_trace']}\n</think>\n\n<solution>\n{row['solution']}\n</solution>"
            )
            assert turn in data.format.tokenizer.decode(example.token_ids)


@pytest.mark.full
def test_two_kills_leave_the_same_bytes(answered: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    traces = folder / "traces.jsonl"
    for problems in (4, 12):
        run = start(*rejection(folder, "--resume=true"))
        lines = problems * ANSWERS
        wait_until(lambda n=lines: traces.exists() and len(traces.read_bytes().splitlines()) >= n, run)
        run.kill()
        run.wait()
    left = len(traces.read_bytes().splitlines())
    assert 12 * ANSWERS <= left < PROBLEMS * ANSWERS
    with traces.open("a") as file:  # a kill within a write
        file.write('{"question": "torn')
    result = rlt(*rejection(folder, "--resume=true"))
    assert result.returncode == 0, result.stderr
    assert f"/{(PROBLEMS - left // ANSWERS + 1) // 2} [" in result.stdout
    for name in ("traces.jsonl", "distillation.jsonl", "README.md"):
        assert (folder / name).read_bytes() == (answered / name).read_bytes(), name


@pytest.mark.full
def test_a_finished_run_selects_other_answers_without_sampling(answered: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", answered, folder], check=True)
    options = ("--resume=true", "--distillation.select=shortest")
    settings = (folder / "config.yaml").read_text().replace(str(answered), str(folder))
    (folder / "config.yaml").write_text(settings)
    result = rlt(*rejection(folder, *options))
    assert result.returncode == 0, result.stderr
    assert "Predicting" not in result.stdout
    rows = [row for row in read(answered / "traces.jsonl") if row["correct"]]
    for row in read(folder / "distillation.jsonl"):
        lengths = [other["student_tokens"] for other in rows if other["row"] == row["row"]]
        assert row["student_tokens"] == min(lengths)


class Scripted(HFEngine):
    """Write given answers, a problem's one after another."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        super().__init__()
        self.answers = answers  # by question

    def sample(
        self, requests: Sequence[SampleRequest], sampling: Sampling, stop: str
    ) -> Iterator[tuple[int, Completion]]:
        groups = []
        for request in requests:
            seed = request.seed
            text = self.tokenizer.decode(request.prompt)
            [answers] = [answers for question, answers in self.answers.items() if question in text]
            ids = [self.tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in answers]
            eos = self.tokenizer.eos_token_id
            groups.append([Completion([*some, eos], None, "eos", seed) for some in ids])
            # An answer that says so was cut off.
            for i, answer in enumerate(answers):
                if answer.endswith("..."):
                    groups[-1][i] = Completion(ids[i], None, "length", seed)
        yield from numbered(groups)


def turn(thought: str, solution: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n<solution>\n{solution}\n</solution>"


@pytest.mark.parametrize("source", ["chains", "word_sums"])
def test_every_answer_is_counted_once_by_what_it_is(source: str, tiny_model: str, tmp_path: Path) -> None:
    data = StudentRLData(
        source,
        tokenizer=tiny_model,
        num_embedded_rows=3,
        tags="r1",
        student_context=200,
        prompts_per_step=2,
    )
    data.setup("predict")
    questions = [(p.question, p.columns["answer"]) for p in data.problems]
    right = [turn("Add.", f"\\boxed{{{answer}}}") for _, answer in questions]
    answers = {
        questions[0][0]: [right[0], turn("Longer thought.", f"So \\boxed{{{questions[0][1]}}}"), right[0]],
        questions[1][0]: [turn("No.", "\\boxed{-1}"), f"\\boxed{{{questions[1][1]}}}", right[1] + "..."],
        questions[2][0]: [right[2].replace("Add", "word " * 300), right[2] + right[2], turn("", right[2])],
    }
    callbacks = [RolloutCallback(Scripted(answers), SHORT, num_traces=3), DistillationWriter("all")]
    module = RLTModule(tiny_model, None, reward=CorrectnessReward())
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=callbacks)
    trainer.predict(module, datamodule=data)
    kept = read(tmp_path / "distillation.jsonl")
    assert [(row["row"], row["trace"]) for row in kept] == [(1, 0), (1, 1), (1, 2)]
    for row in kept:
        assert f"\\boxed{{{dict(questions)[row['question']]}}}" in row["solution"]
        assert row["model"] == tiny_model
    rows = read(tmp_path / "traces.jsonl")
    # Without: an answer without tags, one that opens a second thought, one without a thought.
    assert sum(not row["solution"] for row in rows) == 3
    assert sum(bool(row["solution"]) and not row["correct"] for row in rows) == 1
    assert [row["pass_rate"] for row in rows][::3] == [1, 2 / 3, 1]


def test_an_answer_is_used_if_it_is_right_split_and_fits() -> None:
    row = {"solution": "4", "correct": 1.0, "fits": True}
    assert is_usable(row)
    assert not any(is_usable(row | other) for other in ({"solution": ""}, {"correct": 0.0}, {"fits": False}))


def test_selections_of_answers_take_what_they_say() -> None:
    lengths = {1: [9, 7, 8, 7], 2: [5]}
    rows = [
        {"row": row, "trace": i, "student_tokens": length, "reward": 1.0, "fits": True}
        for row, some in lengths.items()
        for i, length in enumerate(some)
    ]

    def chosen(*options: Any) -> list[tuple[int, int]]:
        return [(row["row"], row["trace"]) for row in DistillationWriter(*options).select_traces(rows)]

    assert chosen("first", 2) == [(1, 0), (1, 1), (2, 0)]
    assert chosen("shortest") == [(1, 1), (2, 0)]
    assert chosen("shortest", 3) == [(1, 1), (1, 3), (1, 2), (2, 0)]
    assert chosen("all") == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rollouts.max_resamples=2"], "rollouts.max_resamples must be 0, since pass_rate counts every"),
        (["--data.filters.duplicates=trace"], "data.filters.duplicates may not be trace"),
        (["--data.filters.min_pass_rate=0.5"], "need rows with pass_rate, which `rlt predict` writes"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(
    options: list[str], expected: str, tmp_path: Path
) -> None:
    assert_one_clear_line(rlt(*rejection(tmp_path / "run", *options)), expected)


def test_a_set_without_a_right_answer_is_refused_and_its_answers_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = rlt(*rejection(folder, "--rollouts.sampling.max_completion_length=1"))
    assert result.returncode == 2
    assert "traces.jsonl can be one" in result.stderr
    assert len(read(folder / "traces.jsonl")) == PROBLEMS * ANSWERS
    assert not (folder / "distillation.jsonl").exists()


def test_a_reward_without_verdicts_keeps_no_answers(tiny_model: str, tmp_path: Path) -> None:
    data = StudentRLData(tokenizer=tiny_model, num_embedded_rows=2)
    callbacks = [RolloutCallback(sampling=SHORT), DistillationWriter()]
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=callbacks)
    with pytest.raises(InputError, match="must be CorrectnessReward, but is NoReward"):
        trainer.predict(RLTModule(tiny_model, None, reward=NoReward()), datamodule=data)


# Raw responses


RAW = "Okay, so 1 + 1.   \r\n\r\n\r\n\r\nThat is 2.\n\n**Final Answer**\n\\boxed{2}"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nIt is \\boxed{2}.", ("Hm.", "It is \\boxed{2}.")),
        ("Hm.\n</think>\n\\boxed{2}", ("Hm.", "\\boxed{2}")),  # the prompt opened the thought
        (turn("Hm.", "\\boxed{2}"), ("Hm.", "\\boxed{2}")),
        (
            "<|begin_of_thought|>Hm.<|end_of_thought|>\n<|begin_of_solution|>2<|end_of_solution|>",
            ("Hm.", "2"),
        ),
        ("Hm.\n**Final Answer**\n2", ("Hm.", "2")),
        ("Hm.\n\n### Final answer:\n2", ("Hm.", "2")),
        ("It is \\boxed{2}.", None),
        ("<think>Hm. It is 2.", None),  # cut off
        ("<think>\n</think>\n2", None),
        ("<think>a</think>b</think>c", None),
        ("Hm.\n**Final Answer**\n", None),
    ],
)
def test_a_raw_response_is_split_where_its_model_marks_it(
    response: str, expected: tuple[str, str] | None
) -> None:
    assert split_raw(response, R1) == expected
    # The form is the model's own, whatever tags are in use.
    if "<solution>" not in response:
        assert split_raw(response, STRATOS) == expected


def test_a_response_with_a_second_tag_is_not_split() -> None:
    assert split_response(turn("Hm.", "2"), R1) == ("Hm.", "2")
    assert split_response(turn("Hm.</solution>", "2"), R1) is None
    assert split_response(turn("Hm.", "2") + turn("Hm.", "3"), R1) is None
    assert split_response(turn("<|end_of_thought|>", "2"), R1) is None


def student_data(source: Path | str, model: str, **options: Any) -> StratosDataModule:
    settings: dict[str, Any] = {"prompts_per_step": 1, "tags": "r1", "student_system_prompt": ""} | options
    kind = settings.pop("kind", StudentSFTData)
    data = kind(str(source), tokenizer=model, **settings)
    data.setup("fit")
    return data


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_raw_responses_are_trained_on_as_they_are_or_post_processed(tiny_model: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"problem": "1 + 1?", "answer": 2, "response": f"<think>{RAW}</think>\n\nIt is $\\boxed{{2}}$."},
        {"problem": "1 + 2?", "answer": "3", "response": "<think>Hm.</think>It is \\boxed{4}."},
        # The right answer is in the row's own solution; of two responses one is right.
        {
            "problem": "2 + 2?",
            "solution": "So \\boxed{4}.",
            "response": ["<think>a</think>\\boxed{5}", "<think>b</think>4"],
        },
        {
            "response": [
                {"role": "user", "content": "5?"},
                {"role": "assistant", "content": "<think>c</think>5"},
            ]
        },
        {"problem": "Cut?", "answer": "1", "response": "<think>Hm"},
        {"problem": "None?", "answer": "1"},
    ]
    source = write(tmp_path / "raw.jsonl", rows)
    options = {"max_bad_frac": 0.5}
    raw = student_data(source, tiny_model, raw=RawResponses("response"), **options)
    assert [example.row for example in raw.examples] == [1, 2, 3, 3, 4]
    assert raw.reports[0].rows_by_reason() == {"missing_tags": [5], "missing_column": [6]}
    texts = [raw.format.tokenizer.decode(example.token_ids) for example in raw.examples]
    assert f"<think>\n{RAW}\n</think>\n\n<solution>\nIt is $\\boxed{{2}}$.\n</solution>" in texts[0]
    assert "5?" in texts[4]
    processed = student_data(
        source,
        tiny_model,
        raw=RawResponses("response"),
        filters=Filters(right_only=True),
        **options,
    )
    assert [example.row for example in processed.examples] == [1, 3]
    texts = [raw.format.tokenizer.decode(example.token_ids) for example in processed.examples]
    assert turn(RAW, "It is $\\boxed{2}$.") in texts[0]
    assert turn("b", "4") in texts[1]
    report = processed.reports[0]
    assert report.rows_by_filter() == {"wrong_answer": [2, 3], "no_reference": [4]}


# Filters


LONG = "A baker sells red and green apples and every evening she counts how many are left over for tomorrow"


def custom(question: str, trace: str = "Count.", **columns: Any) -> dict[str, Any]:
    return {"question": question, "solution": "7", "reasoning_trace": trace, **columns}


@pytest.mark.parametrize(
    ("filters", "rows", "expected"),
    [
        ({"duplicates": "question"}, [custom("a  B"), custom("A b\n", "x"), custom("c")], {"duplicate": [2]}),
        (
            {"duplicates": "trace"},
            [custom("a"), custom("a", "x"), custom("a", " COUNT.")],
            {"duplicate": [3]},
        ),
        (
            {"min_pass_rate": 0.25, "max_pass_rate": 0.5},
            [
                custom("a", pass_rate=0.25),
                custom("b", pass_rate=0.0),
                custom("c", pass_rate=1.0),
                custom("d"),
                custom("e", pass_rate="0.3"),
                custom("f", pass_rate=True),
            ],
            {"pass_rate": [2, 3, 4, 5, 6]},
        ),
        (
            {"right_only": True},
            [custom("a", answer="14/2"), custom("b", answer="8"), custom("c")],
            {"wrong_answer": [2], "no_reference": [3]},
        ),
    ],
)
def test_a_filter_leaves_out_what_it_says(
    filters: dict[str, Any],
    rows: list[dict[str, Any]],
    expected: dict[str, list[int]],
    tiny_model: str,
    tmp_path: Path,
) -> None:
    data = student_data(
        write(tmp_path / "rows.jsonl", rows),
        tiny_model,
        filters=Filters(**filters),
        max_bad_frac=0.0,  # filtered rows are not bad ones
        output_dir=str(tmp_path / "run"),
    )
    left_out = {row for some in expected.values() for row in some}
    assert [example.row for example in data.examples] == sorted(set(range(1, len(rows) + 1)) - left_out)
    [report] = json.loads((tmp_path / "run" / "data_report.json").read_text())["sources"]
    assert report["filters"] == {name: len(some) for name, some in expected.items()}
    assert report["num_used"] + report["num_bad"] + report["num_filtered"] == report["num_rows"] == len(rows)
    assert [row["row"] for row in report["filtered_rows"]] == sorted(left_out)


def test_a_row_that_is_not_used_makes_no_duplicate(tiny_model: str, tmp_path: Path) -> None:
    rows = [custom("a", "long " * 400), custom("a", pass_rate=0.9), custom("a"), custom("a")]
    rows[2:] = [row | {"pass_rate": 0.5} for row in rows[2:]]
    filters = Filters(duplicates="question", max_pass_rate=0.5)
    data = student_data(
        write(tmp_path / "rows.jsonl", rows), tiny_model, filters=filters, max_length=300, max_bad_frac=0.5
    )
    assert [example.row for example in data.examples] == [3]
    assert data.reports[0].rows_by_filter() == {"pass_rate": [1, 2], "duplicate": [4]}
    data = student_data(
        write(tmp_path / "rows.jsonl", rows),
        tiny_model,
        filters=Filters(duplicates="question"),
        max_length=300,
        max_bad_frac=0.5,
    )
    assert [example.row for example in data.examples] == [2]  # the first is too long
    assert data.reports[0].rows_by_reason() == {"too_long": [1]}


def test_duplicates_are_found_across_sources(tiny_model: str, tmp_path: Path) -> None:
    sources = [str(write(tmp_path / f"{name}.jsonl", [custom(name), custom("both")])) for name in "ab"]
    data = StudentSFTData(
        sources,
        tokenizer=tiny_model,
        prompts_per_step=1,
        filters=Filters(duplicates="question"),
    )
    data.setup("fit")
    assert [example.row for example in data.examples] == [1, 2, 3]
    assert [report.rows_by_filter() for report in data.reports] == [{}, {"duplicate": [2]}]


@pytest.mark.parametrize("source", ["word_sums", "chains"])
def test_planted_duplicates_and_test_problems_are_found_and_nothing_else(
    source: str, tiny_model: str, tmp_path: Path
) -> None:
    rows = [row for _, row in read_rows(source, "train", 150, seed=3) if isinstance(row, dict)]
    tests = [row for _, row in read_rows(source, "test", 200, seed=0) if isinstance(row, dict)]
    planted = {
        40: rows[3] | {"reasoning_trace": "Another trace."},
        90: rows[7] | {"question": rows[7]["question"].upper() + " "},
        60: tests[0],
        120: tests[17]
        | {"question": "Return your final response within \\boxed{}. " + tests[17]["question"]},
    }
    for place, row in sorted(planted.items()):
        rows.insert(place - 1, row)
    # Templates share runs of words, so only whole questions count.
    filters = Filters(duplicates="question", overlap_with={source: None}, overlap_ngram=60)
    data = student_data(write(tmp_path / "rows.jsonl", rows), tiny_model, filters=filters)
    assert data.reports[0].rows_by_filter() == {"duplicate": [40, 90], "overlap": [60, 120]}
    assert data.reports[0].bad == []
    assert len(data.examples) == len(rows) - len(planted) == 150


def test_overlap_begins_at_so_many_words_in_a_row(tmp_path: Path) -> None:
    words = LONG.split()
    source = write(tmp_path / "test.jsonl", [{"question": f"{LONG}?", "answer": "1"}])
    overlaps = Overlaps({"mine": str(source)}, size=13)
    assert overlaps.find_overlap(f"Yesterday, {' '.join(words[2:15])}!") == "mine"
    assert overlaps.find_overlap(f"Yesterday, {' '.join(words[2:14])} apples.") is None
    # All of a shorter question counts, and operators tell sums apart.
    source = write(tmp_path / "short.jsonl", [{"problem": "What is 3 + 4?", "answer": "7"}])
    overlaps = Overlaps({"mine": str(source)}, size=13)
    assert overlaps.find_overlap("Box it. What is $3 + 4$?") == "mine"
    assert overlaps.find_overlap("Answer in a box: what is 3+4") == "mine"
    assert overlaps.find_overlap("What is 3 * 4?") is None


def test_a_private_set_is_compared_but_never_written(
    tiny_model: str, tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "zebra quagga okapi"
    options = {f"Incorrect Answer {i}": "no" for i in range(1, 4)} | {"Correct Answer": "yes"}
    private = write(tmp_path / "gpqa.jsonl", [{"Question": f"{LONG} {secret}?", **options}])
    source = write(tmp_path / "rows.jsonl", [custom(f"{LONG}."), custom("b")])
    run = tmp_path / "run"
    filters = Filters(overlap_with={"gpqa_diamond": str(private)})
    data = student_data(source, tiny_model, filters=filters, output_dir=str(run))
    assert data.reports[0].rows_by_filter() == {"overlap": [1]}
    written = (run / "data_report.json").read_text()
    assert "overlaps with one of gpqa_diamond" in written
    told = written + "".join(str(warning.message) for warning in recwarn) + "".join(capfd.readouterr())
    assert not any(word in told for word in secret.split())
    private.write_text(json.dumps({"Question": None, **options}) + "\n")
    with pytest.raises(InputError, match="gpqa_diamond must have a question, but one has not"):
        student_data(source, tiny_model, filters=filters)


def test_operators_are_words() -> None:
    assert split_words("If $x^2=4$, what IS x?") == ["if", "x", "^", "2", "=", "4", "what", "is", "x"]


def test_filters_of_questions_serve_every_stage(tiny_model: str, tmp_path: Path) -> None:
    rows = [custom("1 + 1?", answer="2", pass_rate=0.5), custom("1 + 1?"), custom("c", pass_rate=0.9)]
    source = write(tmp_path / "rows.jsonl", rows)
    filters = Filters(duplicates="question", max_pass_rate=0.6)
    for kind in (TeacherRLData, StudentRLData, TeacherSFTData, ScoringData):
        data = kind(str(source), tokenizer=tiny_model, filters=filters)  # type: ignore[arg-type]
        data.setup("predict")
        assert [item.row for item in data.items] == [1], kind
        assert data.build_card_metadata()["filters"] == {"max_pass_rate": 0.6, "duplicates": "question"}


# The scripts
