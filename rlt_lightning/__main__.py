"""Entry point of `rlt`: answers --version and --help at once, before anything heavy is imported."""

from __future__ import annotations

import os
import signal
import sys

from rlt_lightning import __version__

HELP = """usage: rlt VERB --config FILE [--config OVERLAY ...] [--KEY VALUE ...]
       rlt export --ckpt_path CHECKPOINT --output_dir FOLDER
       rlt chat --model.path MODEL [--model.url URL]
       rlt report RUN_DIR [RUN_DIR ...] [--output FILE]
       rlt dashboard --project PROJECT

Train, apply and evaluate Reinforcement-Learned Teachers (arXiv:2506.08388).

  rlt fit --config configs/quickstart.yaml      a tiny teacher, a tiny student and GRPO, in half a minute
  rlt fit --config configs/teacher_sft.yaml     stage 1: warm the teacher up on reasoning traces
  rlt fit --config configs/teacher_rlt.yaml     stage 2: GRPO with the dense reward of a frozen student
  rlt validate --config configs/teacher_rlt.yaml   held-out reward
  rlt predict --config configs/generate.yaml    stage 3: the trained teacher writes a distillation set
  rlt predict --config configs/rank.yaml        the reward of explanations that you have, and groups by it
  rlt fit --config configs/student_sft.yaml     stage 4: a student learns from the set
  rlt fit --config configs/student_grpo.yaml    traditional RL, by correct answers
  rlt test --config configs/evaluate.yaml       stage 5: accuracy on evaluation sets, beside the paper's
  rlt plan --config configs/teacher_rlt.yaml    the memory and time that `rlt fit` would need
  rlt explain --config configs/rank.yaml        one explanation's reward, term by term and token by token
  rlt export --ckpt_path RUN --output_dir DIR   an ordinary model folder from a checkpoint
  rlt chat --model.path RUN/model               ask a trained student, its thought dimmed
  rlt report RUN                                one page of a run: curves, completions, every token's part
  rlt dashboard --project rlt_lightning         a W&B workspace that shows a project's runs

options:
  --output_dir DIR    where a run's files lie; runs/<config>-<time> when not given
  --ckpt_path last    go on from the last finished iteration of --output_dir; best: from the best validation
  --resume true       go on with the run in --output_dir, whatever the verb; start it if there is none
  --overwrite true    replace the run in --output_dir
  --seed N            of everything random; a seed of its own, such as --data.seed 3, wins over it
  --version           show the version and exit
  --help              show this and exit; `rlt fit --help` lists every setting, and
                      `rlt fit --model.help rlt_lightning.modules.RLTModule` those of a class
"""


def main() -> None:
    """Run the command line; end with one clear line where the user can mend what is wrong."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    if arguments[0] == "--version":
        print(f"rlt {__version__}")
        return
    # A class_path may name a module beside the configs, as with `python -m`. Last: it hides no installed one.
    sys.path.append(os.getcwd())
    try:
        from rlt_lightning.cli.main import run

        status = run()
    except KeyboardInterrupt:  # of imports, or of a verb without a trainer; a trainer says how to go on
        status = 128 + signal.SIGINT
    sys.exit(status)


if __name__ == "__main__":
    main()
