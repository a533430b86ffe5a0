"""Entry point of `rlt`. It answers --version and --help at once, before anything heavy is imported."""

from __future__ import annotations

import os
import signal
import sys

from rlt_lightning.allocator import grow_segments
from rlt_lightning.cli.configs import run_configs
from rlt_lightning.demo.command import run_demo
from rlt_lightning.types import InputError
from rlt_lightning.version import __version__

HELP = """usage: rlt VERB --config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]
       rlt demo [--output_dir DIR]
       rlt configs [NAME] [--copy DIR]
       rlt export --ckpt_path CHECKPOINT --output_dir FOLDER
       rlt chat --model.path MODEL [--model.url URL]
       rlt teach RUN_OR_FOLDER --question TEXT --solution TEXT
       rlt push RUN [--data] --repo_id USER/NAME
       rlt report RUN_DIR [RUN_DIR ...] [--output FILE]
       rlt dashboard --project PROJECT

Train, apply and evaluate Reinforcement-Learned Teachers (arXiv:2506.08388).

  rlt demo                                      what RLT does for a student: all stages, some minutes
  rlt configs                                   the experiments and overlays that come with the package
  rlt fit --config quickstart                   a tiny teacher, a tiny student and GRPO, in half a minute
  rlt fit --config teacher_sft                  stage 1: warm the teacher up on reasoning traces
  rlt fit --config teacher_rlt                  stage 2: GRPO with the dense reward of a frozen student
  rlt validate --config teacher_rlt --data.val_rows 64   held-out reward
  rlt predict --config generate                 stage 3: the trained teacher writes a distillation set
  rlt predict --config rank                     score your own explanations, and group them by reward
  rlt fit --config student_sft                  stage 4: a student learns from the set
  rlt fit --config student_opd                  stage 4b: it learns on its own answers from a teacher
  rlt fit --config student_grpo                 traditional RL, by correct answers
  rlt test --config evaluate                    stage 5: accuracy on evaluation sets, next to the paper's
  rlt plan --config teacher_rlt                 the memory and time that `rlt fit` would need
  rlt explain --config rank                     one explanation's reward by term and by token
  rlt teach RUN --question … --solution …       a teacher's explanation, and what it is worth to a student
  rlt export --ckpt_path RUN --output_dir DIR   turn a checkpoint into an ordinary model folder
  rlt push RUN --repo_id USER/NAME              publish a model or, with --data, a distillation set
  rlt chat --model.path RUN/model               ask a trained student; its thinking is dimmed
  rlt report RUN                                turn a run into one page: curves, completions, tokens
  rlt dashboard --project rlt_lightning         make a W&B workspace of a project's runs

options:
  --config CONFIG     an experiment or overlay by its name, or a file of your own; later ones win
  --output_dir DIR    the run folder; runs/<config>-<time> by default
  --resume true       resume the run in --output_dir, or start it if there is none
  --ckpt_path last    load the newest checkpoint of --output_dir; best: the best by validation
  --overwrite true    replace the run in --output_dir
  --seed N            seed of everything random; --data.seed 3 and the like override it
  --version           show the version and exit
  --help              show this and exit; `rlt fit --help` lists every setting, and
                      `rlt fit --model.help rlt_lightning.modules.RLTModule` the settings of a class
"""


FIRST_RUN = """rlt trains Reinforcement-Learned Teachers (arXiv:2506.08388). First see what that does for a
student, in two or three minutes on two CPU cores; then make a run of your own, half a minute long:

  rlt demo
  rlt fit --config quickstart --output_dir runs/try

Their last lines say where everything is and what to run next. `rlt configs` lists the experiments,
`rlt --help` the verbs.
"""


def main() -> None:
    """Run the command line and exit with its status."""
    arguments = sys.argv[1:]
    if not arguments:
        print(FIRST_RUN, end="")
        return
    if arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    if arguments[0] == "--version":
        print(f"rlt {__version__}")
        return
    if arguments[0] == "demo":
        sys.exit(run_demo(arguments[1:]))
    if arguments[0] == "configs":
        try:
            run_configs(arguments[1:])
            sys.stdout.flush()
        except InputError as error:
            print(f"rlt: error: {error}", file=sys.stderr)
            sys.exit(2)
        except BrokenPipeError:
            # Its reader, such as `head`, has closed the pipe; Python must not try to write the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        return
    # A class_path may name a module in this folder, as with `python -m`. Last, so that it hides no other one.
    sys.path.append(os.getcwd())
    # Before the imports below, since torch is among them.
    grow_segments(os.environ)
    if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
        print("importing PyTorch and rlt_lightning, which takes some seconds", file=sys.stderr)
    try:
        from rlt_lightning.cli.main import run

        status = run()
    except KeyboardInterrupt:
        # During imports, or in a verb without a trainer. A trainer says how to resume.
        status = 128 + signal.SIGINT
    sys.exit(status)


if __name__ == "__main__":
    main()
