"""What the parser makes of a command line: classes that replace others, and paths with any sign."""

from __future__ import annotations

import pytest
import yaml

from rlt_lightning.cli.parser import ConfigParser
from rlt_lightning.rewards import LogProbReward, Reward, RLTReward

CHOSEN = "{class_path: rlt_lightning.rewards.RLTReward, init_args: {kl_weight: 2}}"


class Trained:
    def __init__(self, reward: Reward = RLTReward(), student: str = "", rows: str | list[str] = "") -> None:
        self.reward, self.student, self.rows = reward, student, rows


@pytest.mark.parametrize(
    ("words", "reward"),
    [
        (["--model.reward=LogProbReward"], LogProbReward()),
        (["--model.reward=LogProbReward", "--model.reward.kl_weight=1"], LogProbReward(kl_weight=1)),
        ([f"--model.reward={CHOSEN}", "--model.reward=LogProbReward"], LogProbReward(kl_weight=2)),
        ([f"--model.reward={CHOSEN}", "--model.reward=RLTReward"], RLTReward(kl_weight=2)),
        (["--model.reward.kl_weight=2"], RLTReward(kl_weight=2)),
    ],
    ids=["default", "its own", "chosen before", "short name", "same class"],
)
def test_only_chosen_arguments_are_kept(words: list[str], reward: Reward) -> None:
    parser = ConfigParser()
    parser.add_subclass_arguments(Trained, "model")
    config = parser.parse_args([f"--model={Trained.__module__}.Trained", *words])
    again = parser.parse_string(yaml.safe_dump(yaml.safe_load(parser.dump(config))))
    assert parser.instantiate(config).model.reward == reward
    assert parser.instantiate(again).model.reward == reward


@pytest.mark.parametrize("path", ["/tmp/a: b", "runs/#1: b's/model", "./{a}: [b", "~/a: b: c", "./a: &b *c"])
def test_a_path_with_any_sign_is_text(path: str) -> None:
    parser = ConfigParser()
    parser.add_subclass_arguments(Trained, "model")
    words = [f"--model={Trained.__module__}.Trained", f"--model.student={path}", f"--model.rows={path}"]
    config = parser.parse_args(words)
    saved = parser.parse_string(parser.dump(config))
    assert saved.model.init_args.student == config.model.init_args.student == path
    assert saved.model.init_args.rows == path
    listed = parser.parse_args([*words, "--model.rows", yaml.safe_dump([path, "b"])])
    assert listed.model.init_args.rows == [path, "b"]
