"""Train two steps by TRL's GRPOTrainer with our reward; test_integrations.py compares the files.

It writes into the current folder:

    step-N/         the weights that sampled in step N
    step-N.jsonl    each completion of step N with its reward
    run.json        the mean rewards that TRL has logged
"""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_reward import RLTRewardFunction

from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.models.embedded import resolve
from rlt_lightning.tags import decode


class Recorded(RLTRewardFunction):
    """The reward, with a record of what it was given."""

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        rewards = super().__call__(prompts, completions, completion_ids, **columns)
        folder = Path(f"step-{columns['trainer_state'].global_step}")
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        names = ("question", "solution", "completion", "token_ids", "trl_reward")
        texts = [decode(self.tokenizer, ids) for ids in completion_ids]
        rows = zip(columns["question"], columns["solution"], texts, completion_ids, rewards, strict=True)
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
        folder.with_suffix(".jsonl").write_text("\n".join(lines))
        return rewards


reward = Recorded("miniature", "miniature", tags="r1", teacher_system_prompt="", student_system_prompt="")
rows = [row for _, row in read_rows("chains", num_embedded_rows=8)]
config = GRPOConfig(
    output_dir="trl",
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=32,  # too few for some
    temperature=0.7,
    learning_rate=1e-3,
    max_steps=2,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
)
trainer = GRPOTrainer(
    resolve("miniature"),
    reward_funcs=[reward],
    callbacks=[reward],
    args=config,
    train_dataset=Dataset.from_list(reward.dataset(rows)),
    processing_class=reward.tokenizer,
)
trainer.train()
logged = [line["rewards/rlt/mean"] for line in trainer.state.log_history if "rewards/rlt/mean" in line]
Path("run.json").write_text(json.dumps({"logged": logged}))
