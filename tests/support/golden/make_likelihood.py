"""Write likelihood.json: what the authors' own functions return for six thoughts, with SmolLM2-135M.

    git clone https://github.com/OpenBMB/RLPR, and check out 8490fca; likewise
    sail-sg/VeriFree 718b363 and thinkwee/NOVER cb1a4ef
    python tests/support/golden/make_likelihood.py RLPR VeriFree NOVER     # the three folders

Their files are imported unchanged, with stubs in place of their dependencies; no line of them is copied:

    RLPR      verl/workers/reward_manager/prob.py    ProbRewardManager.__call__
    VeriFree  verifree.py                            VeriFreeLearner.learning_step, compute_rloo_advantages
    NOVER     reward_functions.py, utils.py          reasoning_reward, efficiency_reward, tag_format_reward

NOVER's `calculate_perplexity` runs SmolLM2; the log-probs that it computes for the answer's tokens are
recorded, and all three repositories' functions get them.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlt_lightning.models.embedded import resolve

QUESTION = "A shop sells pens in packs of 12. How many pens are in 7 packs?"
ANSWER = "There are 84 pens."
THOUGHTS = [
    "Each pack has 12 pens, so 7 packs have 7 times 12 pens. 7 times 12 is 84.",
    "12 and 12 is 24, and 12 is 36, and 12 is 48, and 12 is 60, and 12 is 72, and 12 is 84.",
    "The sky is blue and the sea is deep.",
    "84.",
    "Seven packs of twelve, that is 70 and 14, so 74 pens.",
    "We multiply: 7 * 12 =",  # not closed
]
CLOSED = [True, True, True, True, True, False]
SCALE = 0.1


class Stub(ModuleType):
    """A module that has every name, each a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *a, **k: None})


def stub(*names: str, **attributes: Any) -> None:
    for name in names:
        sys.modules[name] = Stub(name)
        sys.modules[name].__path__ = []
    for name, value in attributes.items():
        setattr(sys.modules[names[-1]], name, value)


def load(folder: Path, name: str) -> Any:
    """Import a file of a checkout, and forget the modules that came with it."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        for new in set(sys.modules) - before:
            if str(folder) in str(getattr(sys.modules[new], "__file__", "")):
                del sys.modules[new]


def turn(thought: str, closed: bool) -> str:
    text = f"<think>{thought}"
    return f"{text}</think><answer>{ANSWER}</answer>" if closed else text


def run_nover(folder: Path) -> dict[str, Any]:
    name = resolve("smollm2-135m")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    model = model.float().eval()
    stub("wandb", run=None)
    stub("config", INTERMEDIATE_TAG="think", FINAL_TAG="answer")
    sys.path.insert(0, str(folder))
    utils, rewards = importlib.import_module("utils"), importlib.import_module("reward_functions")
    sys.path.remove(str(folder))
    rewards.set_reference_model(model, tokenizer)
    recorded: list[list[float]] = []
    softmax = utils.selective_log_softmax

    def record(logits: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = softmax(logits, targets)
        recorded.append(found[0].tolist())
        return found

    utils.selective_log_softmax = record
    texts = [turn(thought, closed) for thought, closed in zip(THOUGHTS, CLOSED, strict=True)]
    given = {"prompts": [QUESTION] * len(texts), "reference": [ANSWER] * len(texts)}
    ranks = rewards.reasoning_reward(texts, **given)
    log_probs, recorded[:] = list(recorded), []
    for thought, closed in zip(THOUGHTS, CLOSED, strict=True):
        if not closed:  # which it does not judge
            utils.calculate_perplexity(model, tokenizer, QUESTION, thought, ANSWER)
    utils.calculate_perplexity(model, tokenizer, QUESTION, "", ANSWER)
    found = {
        "log_probs": log_probs + recorded[:-1],
        "empty_log_probs": recorded[-1],
        "lengths": [len(tokenizer.encode(thought)) for thought in THOUGHTS],
        "closed": CLOSED,
        "nover": {
            "rank": ranks,
            "efficiency": rewards.efficiency_reward(texts, **given),
            "format": rewards.tag_format_reward(texts),
        },
    }
    for module in ("utils", "reward_functions"):
        del sys.modules[module]
    return found


class Rows(list[Any]):
    """What the reward manager iterates over."""

    @property
    def batch(self) -> dict[str, Tensor]:
        return {"responses": torch.stack([row.batch["responses"] for row in self])}


def run_rlpr(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    stub("verl", "verl.utils", "verl.utils.reward_score")
    sys.path.insert(0, str(folder / "verl" / "workers" / "reward_manager"))
    prob = importlib.import_module("prob")
    length = len(case["empty_log_probs"])
    texts = [turn(thought, closed) for thought, closed in zip(THOUGHTS, CLOSED, strict=True)]
    tokenizer = SimpleNamespace(decode=lambda ids, **_: texts[int(ids[0])])
    before = float(torch.tensor(case["empty_log_probs"]).exp().mean())
    rows = Rows()
    for number, (log_probs, closed) in enumerate(zip(case["log_probs"], CLOSED, strict=True)):
        ids = torch.full((length,), number)
        batch = {
            "prompts": ids,
            "responses": ids,
            "attention_mask": torch.ones(2 * length, dtype=torch.long),
            "old_log_probs_pr": torch.tensor(log_probs),
            # Of a turn without its tags the trainer marks no token.
            "ground_truth_mask_pr": torch.full((length,), int(closed)),
        }
        own = {"data_source": "ours", "reward_model": {"scoreA": before, "ground_truth": ANSWER}}
        rows.append(SimpleNamespace(batch=batch, non_tensor_batch=own))
    manager = prob.ProbRewardManager(tokenizer, 0, "mean_exp_log_softmax", "threshold_0")
    reward, after, *_ = manager(rows)
    return {"reward": reward.sum(1).tolist(), "after": after.sum(1).tolist()}


class Policy(nn.Module):
    """Gives the recorded log-probs: of two words the one that comes has log-prob x, the other the rest.

    A row's first token is its number.
    """

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        self.log_probs = nn.Parameter(log_probs)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        own = self.log_probs[ids[:, 0]]  # the learner shuffles rows
        logits = torch.stack([torch.log1p(-own.exp()), own], dim=-1)
        return {"logits": torch.cat([logits, logits[:, -1:]], dim=1)}


def run_verifree(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    # The solution's probability is about 1e-8, of which a bound of 1e-4 would see nothing.
    case = case | {"log_probs": [[SCALE * value for value in row] for row in case["log_probs"]]}
    names = ["tree", "launchpad", "vllm", "tqdm", "Levenshtein", "oat", "oat.actors", "oat.actors.base"]
    names += ["oat.algorithms", "oat.algorithms.ppo", "oat.args", "oat.interface", "oat.utils"]
    names += [
        "oat.utils.data",
        "oat.utils.deepspeed",
        "oat.utils.ops",
        "oat.utils.ipc",
        "oat.types",
        "jinja2",
    ]
    for name in names:
        if name not in sys.modules:
            stub(name)
    learner = object.__new__(load(folder, "verifree").VeriFreeLearner)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    closed = torch.tensor(CLOSED)
    answers = len(case["empty_log_probs"])
    number, prompt, think = len(CLOSED), 2, 3
    # Two prompt tokens, three of the thought with p = 1/2, the answer's; of an open thought no answer.
    before = torch.full((number, prompt - 1 + think), 0.5).log()
    policy = Policy(torch.cat([before, torch.tensor(case["log_probs"])], dim=1))
    learner.model, learner.ref_model, learner.optimizer, learner.scheduler = policy, None, None, None
    learner.strategy = SimpleNamespace(
        backward=lambda loss, *_: loss.backward(), optimizer_step=lambda *_: None
    )
    learner.get_completion_mask = lambda mask, lengths: (
        mask.bool() & (torch.arange(mask.shape[1]) >= lengths[0])
    )
    learner.get_batch_logps = lambda logits, ids, mask: (
        logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * mask
    )
    learner.args = SimpleNamespace(
        **{"reward_scale": 1, "reward_source": "p", "sft_coef_source": "reward", "critic_type": "rloo"},
        **{"num_samples": number, "num_ppo_epochs": 1, "train_batch_size_per_device": 1},
        **{"temperature": 1.0, "reinforce_update": False, "beta": 0},
    )
    lengths = [prompt + think + answers * one for one in CLOSED]
    mask = (torch.arange(prompt + think + answers) < torch.tensor(lengths)[:, None]).long()
    rewards: list[list[float]] = []
    compute = learner.compute_rloo_advantages

    def record(values: Tensor, response_masks: Tensor) -> Tensor:
        rewards.append(values.sum(-1).tolist())
        return compute(values, response_masks)

    learner.compute_rloo_advantages = record
    total = torch.tensor(case["log_probs"]).sum(1).masked_fill(~closed, -torch.inf)
    log_probs = policy.log_probs.detach()
    # One row at a time, as in run.sh: of several rows the code multiplies every advantage with every thought.
    learner.learning_step(
        {
            "gt_input_ids": torch.cat([torch.arange(number)[:, None], torch.ones_like(mask[:, 1:])], dim=1),
            "gt_attention_mask": mask,
            "logp_reward": total.tolist(),
            "prompt_ids_lens": [prompt] * number,
            "gt_action_logprobs": [
                row[prompt - 1 : length - 1].tolist() for row, length in zip(log_probs, lengths, strict=True)
            ],
            "loss_masks": [1] * number,
            "think_ids_lens": [think] * number,
            "answer_ids_lens": [answers * one for one in CLOSED],
        }
    )
    assert policy.log_probs.grad is not None
    return {
        "scale_of_log_probs": SCALE,
        "reward": rewards[0],
        # Of each row's loss, by the log-probs of the thought's tokens and of the answer's.
        "thought_gradient": policy.log_probs.grad[:, prompt - 1 : prompt - 1 + think].tolist(),
        "answer_gradient": policy.log_probs.grad[:, prompt - 1 + think :].tolist(),
    }


if __name__ == "__main__":
    rlpr, verifree, nover = map(Path, sys.argv[1:])
    found = run_nover(nover)
    found["rlpr"] = run_rlpr(rlpr, found)
    found["verifree"] = run_verifree(verifree, found)
    found["sources"] = {
        "rlpr": "OpenBMB/RLPR 8490fca",
        "verifree": "sail-sg/VeriFree 718b363",
        "nover": "thinkwee/NOVER cb1a4ef",
    }
    path = Path(__file__).with_name("likelihood.json")
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)
