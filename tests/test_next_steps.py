"""What a run proposes at its end is a command that runs: on its device, with its models, in its format."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from commands import rlt
from jsonargparse import Namespace
from miniatures import PIECES
from test_docs import check_rlt

from rlt_lightning.cli import next_steps
from rlt_lightning.datamodules.token_cache import ItemTable, MadeItem, StoredItems, build_batches
from rlt_lightning.types import SFTExample

CONTEXT = 200  # tokens: less than a prompt and the completions of the configs need


@pytest.fixture(scope="module")
def small_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a context that the shipped configs do not fit."""
    folder = tmp_path_factory.mktemp("small") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(*words: str) -> str:
    """What a run prints."""
    result = rlt(*words)
    assert result.returncode == 0, (words, result.stderr)
    return result.stdout


def proposed(output: str) -> list[str]:
    """The words of the command after "Next:", without the program."""
    lines = output.splitlines()
    [place] = [i for i, line in enumerate(lines) if line.startswith("Next: ")]
    return shlex.split(lines[place + 1])[1:]


def settings(folder: Path) -> dict[str, dict[str, object]]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["trainer"]["accelerator"] == "cpu"
    return {**config, "model": config["model"]["init_args"], "data": config["data"]["init_args"]}


@pytest.mark.full
def test_each_stage_proposes_a_command_that_runs(small_model: str, tmp_path: Path) -> None:
    warm_up = ["fit", "--config=configs/quickstart_smollm2_warmup.yaml", f"--model.pretrained={small_model}"]
    warm_up += ["--data.num_embedded_rows=16", f"--data.max_length={CONTEXT}", "--trainer.max_steps=1"]
    words = proposed(run(*warm_up, f"--output_dir={tmp_path / 'teacher_sft'}"))

    # What follows a proposal only makes it short; a random teacher closes no trace.
    words = proposed(run(*words, "--trainer.max_steps=1", f"--output_dir={tmp_path / 'teacher_rlt'}"))
    rlt_run = settings(tmp_path / "teacher_rlt")
    assert rlt_run["model"]["teacher"] == f"{tmp_path / 'teacher_sft'}/model"
    assert rlt_run["model"]["student"] == small_model

    short = ["--data.num_embedded_rows=4", "--distillation.select=best_reward", "--rollouts.num_traces=1"]
    words = proposed(run(*words, *short, f"--output_dir={tmp_path / 'generate'}"))
    generate = settings(tmp_path / "generate")
    assert generate["model"]["teacher"] == f"{tmp_path / 'teacher_rlt'}/model"
    assert generate["rollouts"]["sampling"] == rlt_run["rollouts"]["sampling"]
    assert rlt_run["rollouts"]["sampling"]["max_completion_length"] < 160  # quickstart_smollm2.yaml's
    assert generate["data"]["student_context"] == CONTEXT
    questions = [
        {json.loads(line)["question"] for line in (tmp_path / name).open()}
        for name in ("teacher_rlt/rollouts.jsonl", "generate/traces.jsonl")
    ]
    assert not questions[0] & questions[1]

    words = proposed(run(*words, "--trainer.max_epochs=1", f"--output_dir={tmp_path / 'student_sft'}"))
    student = settings(tmp_path / "student_sft")
    assert student["model"]["pretrained"] == small_model
    assert student["data"]["prompts_per_step"] <= 4

    run(*words, "--data.max_rows=2", "--rollouts.num_samples=1", f"--output_dir={tmp_path / 'evaluate'}")
    evaluation = settings(tmp_path / "evaluate")
    assert evaluation["model"]["pretrained"] == f"{tmp_path / 'student_sft'}/model"
    for name in ("tags", "student_system_prompt"):
        assert evaluation["data"][name] == rlt_run["data"][name] == generate["data"][name]


def config_of(task: str, **model: object) -> Namespace:
    data = Namespace(task=task, source="bespokelabs/Bespoke-Stratos-17k", seed=0, student_context=None)
    data.update(Namespace(tags="stratos", student_system_prompt=None, teacher_system_prompt=None))
    sampling = Namespace(temperature=0.7, max_completion_length=16384)
    return Namespace(
        output_dir="runs/one",
        trainer=Namespace(callbacks=None),
        data=Namespace(init_args=data),
        model=Namespace(init_args=Namespace(trust_remote_code=False, **model)),
        rollouts=Namespace(sampling=sampling),
    )


def stored(*examples: SFTExample) -> StoredItems:
    made = (MadeItem(example, "", {}) for example in examples)
    return StoredItems([ItemTable(list(build_batches(made, {})))], [1])


def test_on_gpus_the_recipe_goes_on_with_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_steps, "context_length", lambda *_: 32768)
    examples = stored(SFTExample(1, [1, 2, 3], [False, True, True]))
    warmed_up = config_of("teacher_sft", pretrained="Qwen/Qwen2.5-7B-Instruct")
    text = next_steps.propose_after_fit(warmed_up, False, examples)
    assert text is not None
    assert "--config teacher_rlt --model.teacher runs/one/model --data.tags" in text
    assert "--model.student" not in text
    assert "--data.source" not in text  # the config's own
    trained = config_of("rlt", teacher="runs/zero/model", student="bespokelabs/Bespoke-Stratos-7B")
    text = next_steps.propose_after_fit(trained, False, stored())
    assert text is not None
    assert "--config generate " in text
    assert "--data.source FILE" in text  # not what it was trained on
    assert "FILE: questions that it was not trained on" in text
    assert "student_context" not in text  # the config's own


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("task", ["teacher_sft", "rlt", "student_sft", "student_rl"])
def test_every_proposal_is_read_in_an_empty_folder(
    task: str, on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_steps, "context_length", lambda *_: 8192)
    monkeypatch.setattr("sys.argv", ["rlt"])
    monkeypatch.chdir(tmp_path)
    of_rl = {"teacher": "Qwen/Qwen2.5-7B-Instruct", "student": "bespokelabs/Bespoke-Stratos-7B"}
    models = {"pretrained": "Qwen/Qwen2.5-7B-Instruct"} if task.endswith("sft") else of_rl
    config = config_of(task, **models)
    Path("distillation.jsonl").write_text("{}\n")
    texts = [next_steps.propose_after_fit(config, on_cpu, stored(SFTExample(1, [1, 2], [False, True])))]
    if task in ("rlt", "student_rl"):
        texts += [next_steps.propose_after_generation(config, on_cpu, Path("distillation.jsonl"))]
    for text in texts:
        assert text is not None
        program, *words = shlex.split(text.splitlines()[1])
        assert program == "rlt"
        check_rlt(words, tmp_path)


def test_completions_may_be_as_long_as_those_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_steps, "context_length", lambda *_: 8192)
    examples = stored(SFTExample(1, [1] * 101, [False] + [True] * 100))  # quickstart_smollm2.yaml allows 48
    text = next_steps.propose_after_fit(config_of("teacher_sft", pretrained="smollm2-135m"), True, examples)
    assert text is not None
    assert "--rollouts.sampling.max_completion_length 100" in text


def test_nothing_is_proposed_where_no_trace_was_selected(tmp_path: Path) -> None:
    (tmp_path / "distillation.jsonl").touch()
    config = config_of("rlt", student="smollm2-135m")
    assert next_steps.propose_after_generation(config, True, tmp_path / "distillation.jsonl") is None


def test_a_prompt_that_the_run_left_out_replaces_the_configs() -> None:
    text = next_steps.propose_after_fit(config_of("rlt", student="smollm2-135m"), True, stored())
    assert text is not None
    words = shlex.split(text.splitlines()[1])
    assert words[words.index("--data.student_system_prompt") + 1] == "null"


def test_tags_of_ones_own_are_carried_over() -> None:
    tags = {"thought_open": "<t>", "separator": "\n"}
    data = Namespace(tags=Namespace(**tags), student_system_prompt="")
    words = shlex.split(next_steps.build_command("test", "evaluate", {}, data, next_steps.STUDENT_FORMAT))
    assert json.loads(words[words.index("--data.tags") + 1]) == tags
    assert words[-2:] == ["--data.student_system_prompt", ""]


# In miniature, and with rows of one's own


def commands(text: str | None) -> list[list[str]]:
    """The words of every command of a proposal."""
    assert text is not None
    return [shlex.split(line) for line in text.splitlines()[1:]]


def chain_run(task: str, source: object = "chains", **model: object) -> Namespace:
    """The settings of a run with the miniature's format."""
    config = config_of(task, **model)
    config.data.init_args.update(Namespace(source=source, tags="r1", student_system_prompt=""))
    config.data.init_args.teacher_system_prompt = ""
    config.rollouts.sampling = Namespace(temperature=0.7, max_completion_length=48)
    config.output_dir = "runs/quickstart-20260102-030405"
    return config


@pytest.fixture
def any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are only named have the miniature's context."""
    monkeypatch.setattr(next_steps, "context_length", lambda *_: 512)


EXAMPLES = stored(SFTExample(1, [1] * 40, [False] * 20 + [True] * 20))
RUN = "runs/quickstart-20260102-030405"


@pytest.mark.parametrize(
    ("config", "command"),
    [
        (
            chain_run("teacher_sft", pretrained="miniature"),
            f"rlt fit --config quickstart --model.teacher {RUN}/model",
        ),
        (
            chain_run("rlt", teacher="miniature-teacher", student="miniature"),
            f"rlt predict --config miniature_generate --model.teacher {RUN}/model",
        ),
        (
            chain_run("student_sft", pretrained="miniature"),
            f"rlt test --config miniature_evaluate --model.pretrained {RUN}/model",
        ),
    ],
)
def test_the_miniatures_commands_are_short(
    config: Namespace, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_steps, "context_length", lambda *_: 512)
    monkeypatch.setattr("sys.argv", ["rlt"])
    text = next_steps.propose_after_fit(config, True, EXAMPLES)
    assert commands(text) == [shlex.split(command)]
    assert len(command) <= 150


def test_the_student_of_short_traces_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rlt"])
    config = chain_run("rlt", teacher="miniature-teacher", student="miniature")
    config.data.init_args.student_context = 512
    (tmp_path / "distillation.jsonl").write_text("{}\n" * 512)
    text = next_steps.propose_after_generation(config, True, tmp_path / "distillation.jsonl")
    source = f"{tmp_path}/distillation.jsonl"
    assert commands(text) == [["rlt", "fit", "--config", "miniature_student_sft", "--data.source", source]]


@pytest.mark.usefixtures("any_folder")
def test_a_model_trained_from_a_miniature_gets_its_configs(
    miniature: str, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = tmp_path / "runs" / "student" / "model"
    shutil.copytree(miniature, trained)
    for model, name in ((str(trained), "miniature_evaluate"), (tiny_model, "smollm2_evaluate")):
        text = next_steps.propose_after_fit(chain_run("student_sft", pretrained=model), True, EXAMPLES)
        assert f" --config {name} " in str(text)


def test_students_of_one_run_have_a_command_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_steps, "context_length", lambda *_: 512)
    students = {"miniature": 1.0, PIECES: 0.5}
    config = chain_run("rlt", teacher="miniature-teacher", student=None, students=students)
    found = commands(next_steps.propose_after_fit(config, True, EXAMPLES))
    assert [words[words.index("--config") + 1] for words in found] == ["miniature_generate"] * 2
    assert [PIECES in words for words in found] == [False, True]
    (tmp_path / "distillation.jsonl").write_text("{}\n" * 512)
    config.data.init_args.student_context = 512
    found = commands(next_steps.propose_after_generation(config, True, tmp_path / "distillation.jsonl"))
    assert [PIECES in words for words in found] == [False, True]


def sets_of(config: Namespace) -> object:
    """What the proposed evaluation names as its sets; None: those of its config."""
    [words] = commands(next_steps.propose_after_fit(config, True, EXAMPLES))
    name = "--data.sets"
    return json.loads(words[words.index(name) + 1]) if name in words else None


@pytest.mark.usefixtures("any_folder")
def test_an_evaluation_is_of_the_task_that_was_trained(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text("{}\n")
    folders = {"chains": "chains:right", "own": str(own)}
    for name, source in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "distillation.jsonl").write_text("{}\n")
        settings = yaml.safe_dump({"data": {"init_args": {"source": source}}})
        (tmp_path / name / "config.yaml").write_text(settings)

    def student(source: object) -> Namespace:
        return chain_run("student_sft", source, pretrained="miniature")

    assert sets_of(student("chains")) is None
    assert sets_of(student(str(tmp_path / "chains" / "distillation.jsonl"))) is None
    assert sets_of(student("word_sums:right")) == {"word_sums": None}
    placeholder = {"mine": "FILE"}
    for source in (str(own), str(tmp_path / "own" / "distillation.jsonl"), ["chains", str(own)]):
        assert sets_of(student(source)) == placeholder, source
    text = next_steps.propose_after_fit(student(str(own)), True, EXAMPLES)
    assert "FILE: problems that it was not trained on, with their answers" in str(text)


@pytest.mark.usefixtures("any_folder")
def test_an_evaluation_repeats_the_sets_of_the_training() -> None:
    config = chain_run("student_sft", "somebody/rows", pretrained="miniature")
    sets = {"mine": "held_out.jsonl"}
    every = Namespace(class_path="rlt_lightning.callbacks.EvaluateEvery", init_args=Namespace(sets=sets))
    config.trainer.callbacks = [every]
    assert sets_of(config) == sets


def test_the_program_is_named_as_it_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [tmp_path / name / "rlt" for name in ("one", "two")]
    for program in programs:
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(programs[0])])
    for path, found in ((programs[0].parent, "rlt"), (programs[1].parent, str(programs[0]))):
        monkeypatch.setenv("PATH", str(path))
        assert next_steps.find_program() == found


# Whole chains


def accuracy(folder: Path) -> float:
    """The accuracy that `rlt test` has found, in percent."""
    return 100 * float(json.loads((folder / "evaluation.json").read_text())["sets"]["chains"]["pass_at_1"])


@pytest.fixture(scope="module")
def base_accuracy(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What the miniature solves before any training, in percent."""
    folder = tmp_path_factory.mktemp("base")
    run("test", "--config", "miniature_evaluate", f"--output_dir={folder}")
    return accuracy(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "config", "verbs"),
    [
        ("fit", "quickstart", ["predict", "fit", "test"]),
        ("fit", "miniature_warmup", ["fit", "predict", "fit", "test"]),
        ("predict", "miniature_generate", ["fit", "test"]),
        ("predict", "miniature_rejection", ["fit", "test"]),
        ("fit", "miniature_student_sft", ["test"]),
        ("fit", "miniature_opd", ["test"]),
        ("fit", "miniature_grpo", ["test"]),
    ],
)
def test_following_a_miniatures_proposals_makes_no_student_worse(
    verb: str, config: str, verbs: list[str], base_accuracy: float, tmp_path: Path
) -> None:
    words, walked = [verb, "--config", config], []
    while True:
        folder = tmp_path / str(len(walked))
        output = run(*words, f"--output_dir={folder}")
        if words[0] == "test":
            break
        words = proposed(output)
        assert len(shlex.join(["rlt", *words]).replace(str(tmp_path), "runs")) <= 150
        walked.append(words[0])
    print(f"figure: accuracy in percent {accuracy(folder):.1f} after {config}, {base_accuracy:.1f} before")
    assert walked == verbs
    assert accuracy(folder) >= base_accuracy
