"""A model keeps the format that it was trained in: in later stages, exports and servers."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from bespoke import ROWS, bespoke, rows_of, stage_4, student, trained_prompts, write  # noqa: F401
from commands import rlt, run_rlt
from transformers import AutoTokenizer

from rlt_lightning.datamodules import EvaluationDataModule, StudentSFTData, TeacherRLData
from rlt_lightning.datamodules.format_choice import FormatOptions, choose_format
from rlt_lightning.datamodules.formats import ChatFormat, encode
from rlt_lightning.models.format import (
    END,
    FORMAT_FILE,
    ModelFormat,
    with_default_system,
    without_default_system,
    write_format,
)
from rlt_lightning.models.load import load_format, load_tokenizer
from rlt_lightning.tags import R1, STRATOS, TagStyle
from rlt_lightning.types import InputError

QUESTION = "How many legs have three cats?"
OWN = TagStyle("[t]", "[/t]", "[s]", "[/s]", "[e]", "[/e]", separator=" ")


def trained(folder: Path, base: str, role: str = "student", tags: TagStyle = STRATOS, **facts: Any) -> str:
    """A model folder with the format of a training, as an export leaves it."""
    shutil.copytree(base, folder)
    found = ModelFormat(role, tags, **{"system_prompt": "Think.", **facts})  # type: ignore[arg-type]
    write_format(found, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = with_default_system(tokenizer.chat_template, found.system_prompt)
    tokenizer.save_pretrained(folder)
    return str(folder)


# Real rows: what stage 4 trains on is what stage 5 and servers ask


def questions_of(source: str, folder: Path) -> str:
    """An evaluation set with the rows' own questions."""
    rows = [{"question": row["conversations"][0]["value"], "answer": "1"} for row in rows_of(source)]
    return write(folder / "questions.jsonl", rows)


def evaluated_prompts(questions: str, model: str, **options: Any) -> dict[str, list[int]]:
    """The prompts of stage 5 by question, token ids."""
    data = EvaluationDataModule(sets={"own": questions}, tokenizer=model, **options)
    data.setup("test")
    return {problem.question: problem.prompt for problem in data.problems}


def test_later_stages_ask_in_the_format_of_stage_4(
    student: tuple[Path, str], bespoke: str, tiny_model: str, tmp_path: Path
) -> None:
    run, _ = student
    expected = trained_prompts(bespoke, tiny_model)
    questions = questions_of(bespoke, tmp_path)
    rlt("export", f"--ckpt_path={run}", f"--output_dir={tmp_path / 'exported'}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the format is known
        for model in (run / "model", tmp_path / "exported"):
            assert evaluated_prompts(questions, str(model)) == expected
            asked = next(iter(expected))
            tokenizer = AutoTokenizer.from_pretrained(model)
            message = [{"role": "user", "content": asked}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            assert encode(tokenizer, text) == expected[asked]
    words = ["test", "--config=recipe_7b/evaluate", f"--model.pretrained={run / 'model'}"]
    sets = f"--data.sets={json.dumps({'own': questions})}"
    settings = [
        "--data.max_rows=1",
        "--rollouts.sampling.max_completion_length=4",
        "--trainer.accelerator=cpu",
    ]
    result = run_rlt(*words, sets, *settings, f"--output_dir={tmp_path / 'test'}")
    assert "does not record the format" not in result.stderr
    prompt = json.loads((tmp_path / "test/evaluation.json").read_text())["sets"]["own"]["prompt"]
    assert encode(load_tokenizer(tiny_model), prompt) == next(iter(expected.values()))


def test_a_model_folder_says_what_it_was_trained_on(student: tuple[Path, str], bespoke: str) -> None:
    found = load_format(str(student[0] / "model"))
    assert found == ModelFormat("student", STRATOS, rows_of(bespoke)[0]["system"], 1.0)
    assert len(found.system_prompt) == 1312  # the real one, not ours


# The folder's record


def test_the_commonest_prompt_is_recorded_with_its_share(tiny_model: str, tmp_path: Path) -> None:
    rows = [bespoke_row(system) for system in ("A", "B", "A", "A")]
    data = StudentSFTData(write(tmp_path / "rows.jsonl", rows), tokenizer=tiny_model, prompts_per_step=1)
    data.setup("fit")
    assert data.trained_format() == ModelFormat("student", STRATOS, "A", 0.75)
    # A student of mixed prompts is asked with a row's own, where it has one.
    mixed = trained(tmp_path / "mixed", tiny_model, system_prompt="A", share=0.75)
    chosen = choose_format(FormatOptions(), None, mixed)
    assert (chosen.student_system_prompt, chosen.keeps_row_prompts) == ("A", True)


def bespoke_row(system: str) -> dict[str, Any]:
    """A row in Bespoke-Stratos' form with this system prompt."""
    turn = STRATOS.thought_open + "\n\nSo.\n\n" + STRATOS.thought_close + "\n\n"
    turn += STRATOS.solution_open + "\n\n12\n\n" + STRATOS.solution_close
    turns = [{"from": "user", "value": QUESTION}, {"from": "assistant", "value": turn}]
    return {"system": system, "conversations": turns}


@pytest.mark.parametrize("system", ["", "Use {thought_open} and <|end_of_thought|> as they are."])
def test_a_rows_prompt_stays_as_it_is_in_every_stage(system: str, tiny_model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [bespoke_row(system)])
    expected = trained_prompts(source, tiny_model)
    shutil.copytree(tiny_model, tmp_path / "model")
    data = StudentSFTData(source, tokenizer=tiny_model, prompts_per_step=1)
    data.setup("fit")
    write_format(data.trained_format(), tmp_path / "model")
    assert evaluated_prompts(questions_of(source, tmp_path), str(tmp_path / "model")) == expected
    if not system:
        assert "Answer the question" not in data.format.tokenizer.decode(next(iter(expected.values())))


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert load_format(str(tmp_path)) is None
    written = ModelFormat("teacher", OWN, "Wörter\n{x}", 0.5)
    write_format(written, tmp_path)
    assert load_format(str(tmp_path)) == written
    plain = written.to_plain()
    others = {**plain, "tags": {"thought_open": "x"}}, {**plain, "role": "pupil"}, [], "x"
    for text in (*map(json.dumps, others), "", json.dumps(plain)[:40]):
        (tmp_path / FORMAT_FILE).write_text(text)
        with pytest.raises(InputError, match=r"rlt_format.json must hold role, tags, separator"):
            load_format(str(tmp_path))


@pytest.mark.parametrize(
    "prompt", ["Think.", "a 'b' \"c\" \\n {{ x }} %} {% raw %} {# # é 中 😀\nline\r\n end\\"]
)
def test_a_template_has_the_trained_prompt_as_default(smollm2: str, shared: Path, prompt: str) -> None:
    question = {"role": "user", "content": "1 + 1?"}
    for name in (smollm2, str(shared / "data/tokenizers/Qwen2.5-Instruct")):
        tokenizer = load_tokenizer(name)
        before = tokenizer.chat_template

        def text(*messages: dict[str, str], tokenizer: Any = tokenizer) -> str:
            rendered = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
            return str(rendered)

        ours = text({"role": "system", "content": prompt}, question)
        other = text({"role": "system", "content": "Other."}, question)
        tokenizer.chat_template = with_default_system(before, prompt)
        assert text(question) == ours
        assert text({"role": "system", "content": "Other."}, question) == other
        # A prompt that holds our comments ends nothing.
        tokenizer.chat_template = with_default_system(before, END)
        assert text(question) == text({"role": "system", "content": END}, question)
        tokenizer.chat_template = with_default_system(before, prompt)
        # A model that is trained again gets the new default in place of the old one.
        assert without_default_system(tokenizer.chat_template) == before
        assert with_default_system(tokenizer.chat_template, "New") == with_default_system(before, "New")
        assert with_default_system(before, "") == before
        named = with_default_system({"default": before}, prompt)
        assert without_default_system(named) == {"default": before}


# What a run chooses


def test_the_frozen_student_is_asked_in_its_own_format(tiny_model: str, tmp_path: Path) -> None:
    teacher = trained(tmp_path / "teacher", tiny_model, "teacher", R1, system_prompt="Explain.")
    student = trained(tmp_path / "student", tiny_model, "student", STRATOS, system_prompt="Answer.")
    rows = write(tmp_path / "rows.jsonl", [{"question": QUESTION, "solution": "12"}])
    data = TeacherRLData(rows, tokenizer=teacher, student_tokenizer=student, prompts_per_step=1)
    data.setup("fit")
    [problem] = data.problems
    tokenizer = data.format.tokenizer

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    chat = ChatFormat(tokenizer)
    given = "<solution>\n12\n</solution>\n\n<explanation>\n"
    assert text(problem.teacher_prompt) == chat.render("Explain.", QUESTION) + given
    completion = data.format.completion_from_trace(problem, "Four each.")
    rollout = data.format.build_rollout(problem, completion)
    ours = (
        problem.student_prefix
        + problem.think_prefix
        + rollout.require_view().token_ids
        + problem.student_suffix
    )
    thought = "<|begin_of_thought|>\n\nFour each.\n\n<|end_of_thought|>\n\n"
    solution = "<|begin_of_solution|>\n\n12"
    # The student's thought has the student's separators, whatever the teacher's are.
    assert text(ours + problem.solution_ids) == chat.render("Answer.", QUESTION) + thought + solution
    row = data.format.build_conversation(problem, rollout.text)
    assert row["system"] == "Answer."
    assert data.trained_format() == ModelFormat("teacher", R1, "Explain.")


TAGS = "--data.tags=stratos"
CONTRADICTIONS = {
    "fit": ["fit", "--config=configs/laptop/rlt.yaml", "--data.teacher_system_prompt=Other."],
    "test": ["test", "--config=configs/laptop/evaluate.yaml", TAGS],
}


@pytest.mark.parametrize("verb", CONTRADICTIONS)
def test_a_contradiction_is_one_line_that_shows_both(verb: str, miniature: str, tmp_path: Path) -> None:
    teacher = trained(tmp_path / "teacher", miniature, "teacher", R1, system_prompt="")
    student = trained(tmp_path / "student", miniature, "student", R1, system_prompt="")
    words = CONTRADICTIONS[verb]
    both = [f"--model.teacher={teacher}", f"--model.student={student}"]
    models = [f"--model.pretrained={student}"] if verb == "test" else both
    result = rlt(*words, *models, f"--output_dir={tmp_path / 'run'}", text=QUESTION)
    assert result.returncode == 2, result.stderr
    [line] = result.stderr.strip().splitlines()
    assert "was trained with" in line
    assert "force_format true" in line
    assert ("the tags r1, but" in line and "gives stratos" in line) or (
        "no system prompt, but" in line and "gives 'Other.'" in line
    )
    assert not list((tmp_path / "run").glob("*"))


def test_force_overrides_what_a_model_records(tiny_model: str, tmp_path: Path) -> None:
    known = trained(tmp_path / "known", tiny_model)
    with pytest.raises(
        InputError,
        match=r"trained with the system prompt 'Think\.', but --data\.student_system_prompt gives 'X'",
    ):
        choose_format(FormatOptions(student_system_prompt="X"), None, known)
    chosen = choose_format(FormatOptions("r1", None, "X", force_format=True), None, known)
    assert (chosen.student_tags, chosen.student_system_prompt) == (R1, "X")
    teacher = trained(tmp_path / "teacher", tiny_model, "teacher")
    with pytest.raises(
        InputError, match=r"The student must be a model that answers questions, but .* as a teacher"
    ):
        choose_format(FormatOptions(), None, teacher)
    # Fine-tuning gives a model a new role.
    assert choose_format(FormatOptions(), None, teacher, learns=True).recorded is None
    assert choose_format(FormatOptions(force_format=True), None, teacher).guessed == {"student": teacher}


def test_a_student_learns_in_its_own_format_unless_forced(
    tiny_model: str, bespoke: str, tmp_path: Path
) -> None:
    known = trained(tmp_path / "known", tiny_model)
    data = {"tokenizer": known, "prompts_per_step": 2}
    with pytest.raises(
        InputError, match=rf"'Think\.', but {ROWS} of {ROWS} rows have another, such as 'Your"
    ):
        StudentSFTData(bespoke, **data).setup("fit")  # type: ignore[arg-type]
    own = StudentSFTData(bespoke, **data, student_system_prompt="Think.")  # type: ignore[arg-type]
    forced = StudentSFTData(bespoke, **data, force_format=True)  # type: ignore[arg-type]
    for module, expected in ((own, "Think."), (forced, rows_of(bespoke)[0]["system"])):
        module.setup("fit")
        assert module.trained_format().system_prompt == expected
