"""The finding with a real model: SmolLM2-135M as teacher, as frozen student, and as compared students.

    python research/finding_smollm2.py --output_dir DIR          # make finding-smollm2: all arms, three seeds

Every arm trains the same student in the same way, on other explanations of the same problems:

    raw            the uneven traces themselves
    warmup         a teacher that was fine-tuned on such traces, at temperature 0.7 as all others
    greedy         control: the same teacher at temperature 0
    best_of_4      control: the same teacher, the best of four by the reward
    rlt            that teacher after GRPO with the RLT reward
    solution_only  the same without r_KL (lambda 0)
    shuffled       the same with advantages shuffled within each group: nothing to learn from
    oracle         right steps throughout

All seeds share one warm-up. On a GPU: --fit "--trainer.accelerator gpu --trainer.precision bf16-mixed" and,
so that one batch holds all problems, --predict "--trainer.accelerator gpu --data.prompts_per_step 256" and
--test "--trainer.accelerator gpu --data.batch_size 192", these two also with
--rollouts.engine.init_args.max_sequences.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import driver
from arms import SHUFFLED, Arms, Setting, Table, read
from trace_kinds import word_sum_kind

from rlt_lightning.tasks.stepwise import word_sum_rows

WRITTEN: dict[str, dict[str, Any]] = {  # how the warm-up teacher writes the traces of an arm
    "warmup": {},
    "greedy": {"rollouts__sampling__temperature": 0},
    "best_of_4": {"rollouts__num_traces": 4, "distillation__select": "best_reward"},
}
TRAINED: dict[str, dict[str, Any]] = {  # the settings of each teacher that RL trains
    "rlt": {},
    "solution_only": {"model__reward__kl_weight": 0},
    "shuffled": {"model__advantages": SHUFFLED},
}
NUM_TRACES, TRACE_SEED = 256, 2  # problems that students learn from; rows and seed of laptop/smollm2_generate
CONFIG = "laptop/smollm2_"


class SmolLM2(Arms):
    """The arms of one seed."""

    SETTINGS: ClassVar[dict[str, Setting]] = {"smollm2": Setting("smollm2", num_test=192)}
    ARMS = ("raw", *WRITTEN, *TRAINED, "oracle")
    classify = staticmethod(word_sum_kind)

    def write_data(self) -> None:
        """Write the sources of the arms without a teacher, on the problems that the teachers explain."""
        self.write_rows("raw", word_sum_rows(NUM_TRACES, TRACE_SEED))
        self.write_rows("oracle", word_sum_rows(NUM_TRACES, TRACE_SEED, mixture=None))

    def warm_up(self) -> Path:
        """Return the teacher after its warm-up, which all seeds share."""
        return self.stages(f"{self.setting.name}/warmup", "fit", f"{CONFIG}warmup") / "model"

    def make_traces(self, arm: str) -> Path:
        """Return the file that an arm's student learns from."""
        if arm in ("raw", "oracle"):
            return self.data_file(arm)
        teacher, seed = self.warm_up(), self.seed
        if arm in TRAINED:
            seeds = {"model__seed": seed, "rollouts__seed": seed, "data__seed": 10 + seed}
            options = {"model__teacher": teacher, **TRAINED[arm], **seeds}
            teacher = self.stage(f"{arm}/teacher", "fit", f"{CONFIG}rlt", **options) / "model"
        options = {"model__teacher": teacher, "rollouts__seed": 100 + seed, **WRITTEN.get(arm, {})}
        return self.stage(f"{arm}/traces", "predict", f"{CONFIG}generate", **options) / "distillation.jsonl"

    def train_student(self, arm: str) -> Path:
        """Return the student of an arm."""
        options = {"data__source": self.make_traces(arm), "data__seed": self.seed, "model__seed": self.seed}
        return self.stage(f"{arm}/student", "fit", f"{CONFIG}sft", **options) / "model"

    def evaluate(self, arm: str, model: Path | str, **options: Any) -> None:
        """Let an arm's student answer unseen problems, sampled and greedily."""
        options = {"model__pretrained": model, "rollouts__seed": 200 + self.seed}
        self.stage(f"{arm}/sampled", "test", f"{CONFIG}evaluate", **options)
        greedy = {"rollouts__sampling__temperature": 0}
        self.stage(f"{arm}/greedy", "test", f"{CONFIG}evaluate", **options, **greedy)

    @classmethod
    def summarise(cls, ones: list[Any], arms: list[str]) -> dict[str, Table]:
        """Return what each kind of the warm-up teacher's traces earns."""
        if "warmup" not in arms:
            return {}
        rows = read(ones[0].make_traces("warmup").with_name("traces.jsonl"))
        return {"Rewards of the warm-up teacher's traces, nats": cls.measure_rewards(rows)}


if __name__ == "__main__":
    sys.exit(driver.main("finding", __doc__, SmolLM2, "smollm2"))
