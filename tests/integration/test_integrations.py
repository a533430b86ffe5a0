"""RLT's reward in other people's trainers: TRL's GRPOTrainer, and verl's hook called as verl calls it."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl_reward
from cases import full
from commands import ROOT, run_python, run_rlt
from grpo import Witness
from rows_of import read, write
from sampling import Scripted
from trainers import bare_trainer
from trl_reward import LikelihoodRewardFunction, RLTRewardFunction

from rlt_lightning.callbacks import RolloutCallback
from rlt_lightning.datamodules import StudentLikelihoodData
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.engines import Sampling
from rlt_lightning.models.embedded import resolve
from rlt_lightning.models.load import load_model
from rlt_lightning.modules import RLTModule
from rlt_lightning.rewards import LikelihoodReward, NOVERReward, RLPRReward, RLTReward, VeriFreeReward
from rlt_lightning.types import Completion, Rollout

EXAMPLES = str(ROOT / "examples")
PAGE = (ROOT / "docs" / "extend.md").read_text()
SHOWN = dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL))
FORMAT: dict[str, Any] = {"tags": "r1", "teacher_system_prompt": "", "student_system_prompt": ""}
ROWS = [row for _, row in read_rows("chains", num_embedded_rows=3)]
TEXTS = [
    "4 times 3 is 2, 2 times 3 is 6, 6 add 1 is 7.\n</explanation>",
    "one looks at the numbers.\n</explanation>",
    "4 times 3 is 2, and so",  # without its end
    "\n</explanation>",  # empty
]


def predicted(source: Path, teacher: str, folder: Path, estimator: str = "k1") -> list[float]:
    """The rewards that `rlt predict` gives to the completions of a file."""
    options = [f"--data.source={source}", f"--model.teacher={teacher}", "--model.student=miniature"]
    options += ["--model.reward.score_given=false", f"--model.reward.kl_estimator={estimator}"]
    options += ["--data.tags=r1", f"--output_dir={folder}"]
    options += ["--data.teacher_system_prompt=", "--data.student_system_prompt=", "--trainer.accelerator=cpu"]
    run_rlt("predict", "--config=configs/recipe_7b/score.yaml", *options)
    return [row["reward"] for row in read(folder / "scores.jsonl")]


# TRL


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of TRL."""
    pytest.importorskip("trl", reason="needs TRL: make setup")
    folder = tmp_path_factory.mktemp("trl")
    run_python((ROOT / "tests" / "support" / "trl_run.py").read_text(), folder, PYTHONPATH=EXAMPLES)
    return folder


def test_trl_gets_the_rewards_of_predict(run: Path, tmp_path: Path) -> None:
    rows = read(run / "step-1.jsonl")
    ours = [row["trl_reward"] for row in rows]
    assert len(set(ours)) > 4
    reward = shown()
    for row in rows:  # else `rlt predict` would score other tokens than TRL has sampled
        problem = reward.build_problem(1, row)
        token_ids = reward.format.completion_from_text(problem, row["completion"]).token_ids
        assert token_ids == row["token_ids"][: len(token_ids)]
    theirs = predicted(run / "step-1.jsonl", str(run / "step-1"), tmp_path / "scores")
    assert theirs == pytest.approx(ours, abs=1e-4)
    print(f"figure: largest difference {max(abs(a - b) for a, b in zip(ours, theirs, strict=True)):.1e}")
    logged = json.loads((run / "run.json").read_text())["logged"]
    assert logged[1] == pytest.approx(sum(ours) / len(ours), abs=1e-5)


def shown(model: Any = None, **options: Any) -> RLTRewardFunction:
    """TRL's reward, shown a model as transformers shows it."""
    reward = RLTRewardFunction("miniature", "miniature", **FORMAT | options)
    if model is not None:
        kwargs = {"model": model, "processing_class": reward.tokenizer}
        reward.on_init_end(SimpleNamespace(bf16=False), None, None, **kwargs)
    return reward


def rewards_of(reward: RLTRewardFunction, texts: list[str], **further: Any) -> list[float]:
    """The rewards of completions of one row, called as TRL calls it."""
    ids = [reward.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    [columns] = reward.dataset(ROWS[:1])
    lists = {name: [value] * len(texts) for name, value in columns.items() if name != "prompt"}
    return reward([columns["prompt"]] * len(texts), texts, ids, trainer_state=None, **lists, **further)


@pytest.fixture
def model() -> Any:
    """The miniature as TRL loads it: in training mode, with transformers' attention."""
    return load_model("miniature", attn_implementation="sdpa").train()


def test_the_trained_model_stays_as_it_was(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    first, second = (rewards_of(shown(model), TEXTS) for _ in range(2))
    assert first == second
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_what_follows_the_end_tag_does_not_count(model: Any) -> None:
    reward = shown(model)
    end = reward.tokenizer.eos_token
    expected = rewards_of(reward, TEXTS[:1])
    assert rewards_of(reward, [f"{TEXTS[0]} add 1{end}"]) == pytest.approx(expected, abs=1e-6)


def test_an_adapter_counts(model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    plain = rewards_of(shown(model), TEXTS)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with_adapter = rewards_of(shown(wrapped), TEXTS)
    assert with_adapter != pytest.approx(plain, abs=1e-2)
    merged = wrapped.merge_and_unload()
    assert with_adapter == pytest.approx(rewards_of(shown(merged), TEXTS), abs=1e-4)


def test_the_teacher_reads_the_prompt_that_trl_has_tokenised(model: Any) -> None:
    reward = shown(model)
    terms: list[dict[str, float]] = [{}, {}]
    rewards_of(reward, TEXTS[:1], log_metric=terms[0].__setitem__)
    # A tokenizer that joins the last newline to the tag would end so.
    reward.processing_class = lambda text: {"input_ids": reward.tokenizer(text=text)["input_ids"][:-1]}
    rewards_of(reward, TEXTS[:1], log_metric=terms[1].__setitem__)
    assert terms[0].keys() == {"rlt/solution", "rlt/kl", "rlt/format"}
    assert terms[0]["rlt/solution"] == pytest.approx(terms[1]["rlt/solution"], abs=1e-6)
    assert terms[0]["rlt/kl"] != pytest.approx(terms[1]["rlt/kl"], abs=1e-2)


# Likelihood rewards in TRL


def identity(one: Rollout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A rollout's prompt and completion."""
    return tuple(one.problem.teacher_prompt), tuple(one.completion.token_ids)


@pytest.mark.parametrize(
    ("scorer", "kind"),
    [("policy", RLPRReward()), full("policy", VeriFreeReward()), full("smollm2", NOVERReward())],
    ids=["rlpr", "verifree", "nover"],
)
def test_trl_gets_the_likelihood_rewards_of_our_stage(
    scorer: str, kind: LikelihoodReward, smollm2: str, tmp_path: Path
) -> None:
    pytest.importorskip("trl", reason="needs TRL: make setup")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    steps: list[tuple[list[Rollout], list[float]]] = []

    class Recorded(LikelihoodRewardFunction):
        def score(self, rollouts: Sequence[Rollout], *options: Any) -> Any:
            terms = super().score(rollouts, *options)
            steps.append((list(rollouts), terms.rewards.tolist()))
            self.model.save_pretrained(tmp_path / f"weights{len(steps)}")
            self.tokenizer.save_pretrained(tmp_path / f"weights{len(steps)}")
            return terms

    scorer = smollm2 if scorer == "smollm2" else scorer
    reward = Recorded("miniature", scorer, kind, tags="r1", student_system_prompt="")
    options = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 32}
    options |= {"learning_rate": 1e-3, "max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none"}
    rows = Dataset.from_list(reward.dataset(ROWS[:2]))
    both = {"args": GRPOConfig(str(tmp_path), **options), "train_dataset": rows}
    models = {"model": resolve("miniature"), "processing_class": reward.tokenizer}
    GRPOTrainer(**models, **both, reward_funcs=[reward], callbacks=[reward]).train()
    for number, (sampled, theirs) in enumerate(steps, start=1):
        groups: dict[tuple[int, ...], list[Completion]] = {}
        for one in sampled:
            groups.setdefault(identity(one)[0], []).append(one.completion)
        known = {identity(one): value for one, value in zip(sampled, theirs, strict=True)}
        witness, model = Witness(), str(tmp_path / f"weights{number}")
        module = RLTModule(model, scorer, group_size=4, reward=kind)
        asked = {"student_tokenizer": scorer} if scorer == smollm2 else {}
        data = StudentLikelihoodData(
            source=ROWS[:2], prompts_per_step=2, tokenizer=model, tags="r1",
            student_system_prompt="", output_dir=str(tmp_path), **asked,
        )  # fmt: skip
        engine = Scripted(lambda request, groups=groups: groups[tuple(request.prompt)])
        rollouts = RolloutCallback(engine, Sampling(temperature=1.0, max_completion_length=32))
        bare_trainer(tmp_path, rollouts, witness).fit(module, data)
        [batch] = witness.batches
        assert batch.rollouts is not None
        ours = batch.step.rewards.tolist()
        keys = [identity(one) for one in batch.rollouts.rollouts]
        assert ours == pytest.approx([known[key] for key in keys], abs=1e-4)
        assert max(ours) - min(ours) > 1e-3


# verl


def as_verl_loads(path: Path, name: str = "compute_score") -> Callable[..., Any]:
    """The function of a file, as `get_custom_reward_fn` of verl 0.9.1 loads and wraps it."""
    spec = importlib.util.spec_from_file_location("custom_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)

    async def call(raw: Any, extra: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return await raw(*args, **kwargs | extra)

    assert inspect.iscoroutinefunction(function)
    return partial(call, function, {})


def hook(**options: Any) -> verl_reward.RLTRewardFunction:
    return verl_reward.RLTRewardFunction("miniature", "miniature", **FORMAT | options)


def test_verl_runs_the_file_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "rlt_reward.py").write_text(SHOWN["rlt_reward.py"])
    compute_score = as_verl_loads(tmp_path / "rlt_reward.py")
    [call, *_] = calls_of(hook())
    assert asyncio.run(compute_score(**call)).keys() == {"score", "solution", "kl", "format"}


def test_trl_runs_the_file_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs TRL: make setup")
    done = run_python(SHOWN["train_trl.py"], tmp_path, PYTHONPATH=EXAMPLES)
    assert "rewards/rlt/mean" in done.stdout


def test_the_file_for_verl_writes_its_data(tmp_path: Path) -> None:
    done = run_python(SHOWN["rlt_reward.py"], tmp_path, PYTHONPATH=EXAMPLES)
    assert done.stdout.startswith("custom_chat_template: ")
    assert (tmp_path / "train.parquet").is_file()


def calls_of(reward: verl_reward.RLTRewardFunction) -> list[dict[str, Any]]:
    """The keywords with which verl's `naive` calls for each text and row."""
    rows = reward.dataset(ROWS)
    return [
        {
            "data_source": row["data_source"],
            "solution_str": text,
            "ground_truth": row["reward_model"]["ground_truth"],
            "extra_info": row["extra_info"] | {"num_turns": 2, "rollout_reward_scores": {}},
        }
        for row in rows
        for text in TEXTS
    ]


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_verl_gets_the_rewards_of_predict(estimator: Any, tmp_path: Path) -> None:
    reward = hook(reward=RLTReward(kl_estimator=estimator))
    calls = calls_of(reward)

    async def gathered() -> list[dict[str, float]]:
        return await asyncio.gather(*(reward.compute_score(**call) for call in calls))

    scores = asyncio.run(gathered())
    names = {"solution": "ground_truth", "completion": "solution_str"}
    rows = [
        {"question": call["extra_info"]["question"]} | {ours: call[name] for ours, name in names.items()}
        for call in calls
    ]
    theirs = predicted(write(tmp_path / "rows.jsonl", rows), "miniature", tmp_path / "scores", estimator)
    assert [score["score"] for score in scores] == pytest.approx(theirs, abs=1e-4)
    for score in scores:
        assert score["score"] == pytest.approx(score["solution"] + score["kl"] + score["format"], abs=1e-5)


def test_verl_renders_the_prompt_of_the_teacher() -> None:
    reward = hook()
    for number, (row, made) in enumerate(zip(ROWS, reward.dataset(ROWS), strict=True), start=1):
        options = {"chat_template": verl_reward.CHAT_TEMPLATE, "add_generation_prompt": True}
        ids = reward.tokenizer.apply_chat_template(made["prompt"], return_dict=False, **options)
        assert ids == reward.build_problem(number, row).teacher_prompt
