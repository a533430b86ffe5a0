"""Chat templates with more than a prompt: ends of turns, opened thoughts, channels and dates."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from transformers import AutoTokenizer, GenerationConfig

from rlt_lightning import OptimizerConfig, SFTModule, StratosDataModule, StudentSFTData, Trainer
from rlt_lightning.callbacks import Checkpoint
from rlt_lightning.checkpoints.export import export_checkpoint
from rlt_lightning.datamodules import EvaluationDataModule
from rlt_lightning.datamodules.formats import ChatFormat, encode
from rlt_lightning.datamodules.views import find_thought
from rlt_lightning.models import template
from rlt_lightning.models.template import find_eos_token_ids, find_turn_opening
from rlt_lightning.tags import decode
from rlt_lightning.types import SFTExample


def build(user: str, assistant: str, prompt: str, system: str = "", start: str = "") -> str:
    """Return a template that writes these Jinja expressions for the roles and as generation prompt."""
    return (
        f"{start}{{%- for m in messages %}}{{%- if m.role == 'user' %}}{{{{ {user} }}}}"
        f"{{%- elif m.role == 'system' %}}{{{{ {system or user} }}}}{{%- else %}}{{{{ {assistant} }}}}"
        f"{{%- endif %}}{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{ {prompt} }}}}{{%- endif %}}"
    )


def build_chatml(assistant: str, prompt: str = "'<|im_start|>assistant\n'") -> str:
    return build("'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'", assistant, prompt)


PLAIN = "'<|im_start|>assistant\n' + m.content + '<|im_end|>\n'"
EMPTY_THOUGHT = PLAIN.replace("m.content", "('<think>\n\n</think>\n\n' if loop.last else '') + m.content")
OPENED = "'<|im_start|>assistant\n<think>\n'"
# The token layouts of families, in our own words.
TEMPLATES = {
    "gemma": build(
        "'<start_of_turn>user\n' + m.content + '<end_of_turn>\n'",
        "'<start_of_turn>model\n' + m.content + '<end_of_turn>\n'",
        "'<start_of_turn>model\n'",
        start="{{ bos_token }}",
    ),
    "phi3": "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
    "chatml": build_chatml(PLAIN),
    "mistral": build(
        "'[INST] ' + m.content + '[/INST]'", "' ' + m.content + '</s>'", "''", start="{{ bos_token }}"
    ),
    "nemotron": "{% for m in messages %}{{ '<SPECIAL_10>' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\n' }}{% endif %}",
    "seed_oss": build(
        *["bos_token + m.role + '\n' + m.content + eos_token"] * 2, prompt="bos_token + 'assistant\n'"
    ),
    "r1": build(
        "'<|User|>' + m.content",
        "'<|Assistant|>' + m.content + eos_token",
        "'<|Assistant|><think>\n'",
        "m.content",
        "{{ bos_token }}",
    ),
    "exaone_deep": build(
        "'[|user|]' + m.content + '\n'",
        "'[|assistant|]' + m.content + '[|endofturn|]\n'",
        "'[|assistant|]<thought>\n'",
        "'[|system|]' + m.content + '[|endofturn|]\n'",
    ),
    "qwen3": build_chatml(EMPTY_THOUGHT),
    "qwen3_thinking": build_chatml(EMPTY_THOUGHT, OPENED),
    "glm4.5": build(
        "'<|user|>\n' + m.content",
        "'<|assistant|>\n<think>' + (m.reasoning_content or '') + '</think>\n' + m.content",
        "'<|assistant|>'",
        "'<|system|>\n' + m.content",
    ),
    "glm5": build(
        "'<|user|>' + m.content",
        "'<|assistant|>' + ('<think>' + m.reasoning_content if m.reasoning_content else '') + '</think>'"
        " + m.content",
        "'<|assistant|><think>'",
        "'<|system|>' + m.content",
    ),
    "nemotron3": build_chatml(
        "'<|im_start|>assistant\n<think>' + (m.reasoning_content or '') + '</think>' + m.content"
        " + '<|im_end|>\n'",
        OPENED,
    ),
    "harmony": build(
        "'<|start|>user<|message|>' + m.content + '<|end|>'",
        "('<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if m.thinking else '')"
        " + '<|start|>assistant<|channel|>final<|message|>' + m.content"
        " + ('<|return|>' if loop.last else '<|end|>')",
        "'<|start|>assistant'",
        "'<|start|>developer<|message|>' + m.content + '<|end|>'",
    ),
    # Chat ML, but without a generation prompt.
    "no_prompt": build_chatml(PLAIN, "''"),
    "no_prompt_thinks": build_chatml(
        "'<|im_start|>assistant\n' + ('<think>' + m.reasoning_content + '</think>' if m.reasoning_content"
        " else '') + m.content + '<|im_end|>\n'",
        "''",
    ),
    "always_prompts": build_chatml(PLAIN, "''")
    + "{% if messages[-1].role != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "always_prompts_model": build_chatml(PLAIN, "''") + "{{ '<|im_start|>model\n' }}",
}
CONTROLS = (
    *("<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "</s>"),
    *("[INST]", "[/INST]", "<SPECIAL_10>", "<SPECIAL_11>", "<|User|>", "<|Assistant|>", "[|user|]"),
    *("[|assistant|]", "[|endofturn|]", "<|start|>", "<|channel|>", "<|message|>", "<|return|>"),
    *("<think>", "</think>"),
)
QUESTION, THOUGHT, SOLUTION = "What is 3 * 4?", "\n\nThree fours.\n\n", "\n\nIt is 12.\n\n"
TURN = (
    f"<|begin_of_thought|>{THOUGHT}<|end_of_thought|>\n\n<|begin_of_solution|>{SOLUTION}<|end_of_solution|>"
)


@pytest.fixture(scope="module")
def smol(smollm2: str) -> Any:
    """SmolLM2's tokenizer with the control tokens of the families; its eos is <|endoftext|>."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.add_tokens(list(CONTROLS), special_tokens=True)
    tokenizer.eos_token = "<|endoftext|>"
    return tokenizer


def build_format(smol: Any, name: str) -> ChatFormat:
    tokenizer = copy.copy(smol)
    tokenizer.chat_template = TEMPLATES[name]
    return ChatFormat(tokenizer, "stratos", "Teach.", "Learn.")


def read_counted(chat: ChatFormat, example: SFTExample) -> str:
    """Return the text of the tokens that the loss counts."""
    ids = [token for token, counts in zip(example.token_ids, example.loss_mask, strict=True) if counts]
    return decode(chat.tokenizer, ids)


# Ends of turns


ENDS = {
    **{"gemma": "<end_of_turn>", "phi3": "<|end|>", "chatml": "<|im_end|>", "mistral": "</s>"},
    **{"harmony": "<|return|>", "glm4.5": "<|endoftext|>"},
    "nemotron": "<|endoftext|>",  # nothing but a line break ends its turn
}


@pytest.mark.parametrize("name", ENDS)
def test_a_turn_ends_as_its_template_ends_it(smol: Any, name: str) -> None:
    chat, end = build_format(smol, name), ENDS[name]
    student = chat.build_student_sft_example(1, QUESTION, THOUGHT, SOLUTION)
    assert read_counted(chat, student).endswith(f"<|end_of_solution|>{end}")
    problem = chat.build_problem(1, QUESTION, SOLUTION)
    teacher = chat.build_teacher_sft_example(problem, "Three fours.")
    assert read_counted(chat, teacher).endswith(f"<|end_of_explanation|>{end}")


@pytest.mark.parametrize("name", ENDS)
def test_generation_stops_where_turns_end(smol: Any, name: str) -> None:
    class Model:
        generation_config = GenerationConfig(eos_token_id=7)

    chat = build_format(smol, name)
    ends = {7, *chat.tokenizer.convert_tokens_to_ids(["<|endoftext|>", ENDS[name]])}
    assert find_eos_token_ids(Model, chat.tokenizer) == ends


# What a turn begins with


OPENINGS = {
    **dict.fromkeys(("gemma", "phi3", "chatml", "mistral", "nemotron", "seed_oss", "qwen3"), ("", "")),
    **{"r1": ("<think>\n", ""), "exaone_deep": ("<thought>\n", ""), "qwen3_thinking": ("<think>\n", "")},
    **{"glm4.5": ("", ""), "glm5": ("<think>", "")},
    "nemotron3": ("\n", "</think>"),  # nothing shows where its turn's header ends
    "harmony": ("", "<|channel|>final<|message|>"),
    **dict.fromkeys(("no_prompt", "no_prompt_thinks"), ("", "<|im_start|>assistant\n")),
    **dict.fromkeys(("always_prompts", "always_prompts_model"), ("", "")),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_openings_are_found_by_rendering(smol: Any, name: str) -> None:
    assert find_turn_opening(build_format(smol, name).tokenizer) == OPENINGS[name]


@pytest.mark.parametrize("name", sorted({*OPENINGS} - {"qwen3", "qwen3_thinking", "glm4.5", "glm5"}))
def test_the_trained_turn_is_the_templates(smol: Any, name: str) -> None:
    chat = build_format(smol, name)
    example = chat.build_student_sft_example(1, QUESTION, THOUGHT, SOLUTION)
    roles = {"system": "Learn.", "user": QUESTION, "assistant": TURN}
    messages = [{"role": role, "content": text} for role, text in roles.items()]
    expected = chat.tokenizer.apply_chat_template(messages, tokenize=False)
    if name == "mistral":  # a space that its prompt lacks; servers send the prompt
        expected = expected.replace(f" {TURN}", TURN)
    if name == "always_prompts_model":
        expected = expected.replace("assistant", "model").removesuffix("<|im_start|>model\n")
    if name == "nemotron":
        expected = expected.replace("SPECIAL_10>assistant", "SPECIAL_11>Assistant")
        expected = expected.removesuffix("\n") + "<|endoftext|>"
    if name == "phi3":
        expected = expected.removesuffix("<|endoftext|>")
    assert decode(chat.tokenizer, example.token_ids) == expected.removesuffix("\n")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_thinking", "glm4.5", "glm5"])
def test_our_thought_replaces_an_empty_one(smol: Any, name: str) -> None:
    chat = build_format(smol, name)
    text = decode(chat.tokenizer, chat.build_student_sft_example(1, QUESTION, THOUGHT, SOLUTION).token_ids)
    assert "think>" not in text
    assert f"assistant\n{TURN}" in text or f"<|assistant|>{TURN}" in text


def test_every_text_of_ours_is_in_the_final_channel(smol: Any) -> None:
    chat, opening = build_format(smol, "harmony"), "<|channel|>final<|message|>"
    problem = chat.build_problem(1, QUESTION, SOLUTION)
    teacher = decode(chat.tokenizer, problem.teacher_prompt)
    assert f"<|start|>assistant{opening}<|begin_of_solution|>" in teacher
    student = decode(chat.tokenizer, problem.student_prefix)
    assert student.endswith(f"<|start|>assistant{opening}<|begin_of_thought|>")
    # The student is asked with the generation prompt, as by servers, and learns to open the channel.
    assert chat.render_student_chat(QUESTION).endswith("<|start|>assistant")
    example = chat.build_student_sft_example(1, QUESTION, THOUGHT, SOLUTION)
    assert read_counted(chat, example) == f"{opening}{TURN}<|return|>"
    answer = encode(chat.tokenizer, opening + TURN)
    start, end, _ = find_thought(chat, answer) or (0, 0, False)
    assert decode(chat.tokenizer, answer[start:end]).strip() == THOUGHT.strip()


# Dates


DATED = (
    "{%- set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}"
    "<|im_start|>system\nToday: {{ day }}<|im_end|>\n" + TEMPLATES["chatml"]
)
ROWS = [
    {"question": f"What is {n} * 4?", "reasoning_trace": "So.", "solution": str(4 * n)} for n in (2, 3, 5)
]


@pytest.fixture(scope="module")
def dated(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a template that prints the date, and an eos that ends no turn."""
    folder = tmp_path_factory.mktemp("dated") / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.eos_token = DATED, "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=0).save_pretrained(folder)
    return folder


def fit(model: Path, run: Path, steps: int) -> StratosDataModule:
    data = StudentSFTData(ROWS, prompts_per_step=1)
    options: dict[str, Any] = {"callbacks": [Checkpoint(every_n_train_steps=1)], "accelerator": "cpu"}
    trainer = Trainer(run, max_steps=steps, resume=True, enable_progress_bar=False, **options)
    trainer.fit(SFTModule(str(model), OptimizerConfig(1e-3)), data)
    return data


@pytest.fixture(scope="module")
def trained(dated: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SFTExample]]:
    """A run with the model, and its rows."""
    run = tmp_path_factory.mktemp("dates") / "run"
    return run, list(fit(dated, run, 1).items)


Trained = tuple[Path, list[SFTExample]]


def test_all_stages_print_the_same_date(trained: Trained, dated: Path, tmp_path: Path) -> None:
    run, rows = trained
    assert "Today: 01 Jan 2026" in AutoTokenizer.from_pretrained(dated).decode(rows[0].token_ids)
    export_checkpoint(str(run), str(tmp_path / "exported"))
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": ROWS[0]["question"], "answer": "8"}) + "\n")
    for model in (run / "model", tmp_path / "exported"):
        data = EvaluationDataModule(sets={"own": str(questions)}, tokenizer=str(model))
        data.setup("test")
        [problem] = data.problems
        assert problem.prompt in [example.token_ids[: example.loss_mask.index(True)] for example in rows]


def test_an_exported_model_stops_where_it_learnt_to(trained: Trained) -> None:
    run, rows = trained
    assert all(example.token_ids[-1] == 2 for example in rows)  # <|im_end|>
    assert json.loads((run / "model/generation_config.json").read_text())["eos_token_id"] == [0, 2]


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("{{ strftime_now ( '%d %b' ) }}", "01 Jan"),
        ('{{ strftime_now("%A, %d %B \'%y") }}', "Thursday, 01 January '26"),
        ("{{ strftime_now('%d \"%b\"') }}", '01 "Jan"'),
        ("{# strftime_now #}{{ strftime_now('%Y') if strftime_now is defined }}", "2026"),
    ],
)
def test_a_date_is_fixed_however_it_is_written(call: str, shown: str) -> None:
    fixed = template.fix_date(call, "model")
    assert Template(fixed).render(strftime_now=lambda form: pytest.fail("asks for the date")) == shown
