"""A class that replaces another on the command line keeps its own defaults."""

from __future__ import annotations

import pytest
import yaml

from rlt_lightning.cli.parser import ConfigParser
from rlt_lightning.rewards import LogProbReward, Reward, RLTReward

CHOSEN = "{class_path: rlt_lightning.rewards.RLTReward, init_args: {kl_weight: 2}}"


class Trained:
    def __init__(self, reward: Reward = RLTReward()) -> None:
        self.reward = reward


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
