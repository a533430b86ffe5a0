"""Print `rlt --help` and `rlt VERB --help` at once, without importing PyTorch."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

from rlt_lightning.types import InputError

HELPS = {"-h", "--help"}

RUN = """  --config CONFIG        a config by name (rlt configs), or a YAML file; a later one wins
  --output_dir DIR       the run folder; runs/<config>-<time> by default
  --resume true          resume the run in --output_dir, or start it if there is none
  --overwrite true       replace the run in --output_dir
  --seed N               seed of everything random
"""
MACHINE = """  --trainer.accelerator auto          cpu or gpu; auto takes a GPU if there is one
  --trainer.devices auto              number of processes, a GPU each; auto takes all GPUs
  --trainer.precision 32-true         or bf16-mixed
"""
MODELS = """  --model.teacher MODEL               the teacher: local folder, hub id, miniature or smollm2-135m
  --model.student MODEL               the frozen student that scores it, with any tokenizer
  --model.pretrained MODEL            the model of the other stages
"""
REWARD = """  --model.reward.kl_weight 3.0        weight of r_KL, lambda in the paper
  --model.reward.kl_estimator k1      k1, k3 or exact
"""
DATA = """  --data.source SOURCE                file, folder, hub id or embedded task: question and solution
  --data.max_rows N                   most rows read of each source
"""
SAMPLING = """  --rollouts.sampling.temperature 0.7
  --rollouts.sampling.max_completion_length 16384    tokens, end tag included
  --rollouts.engine CLASS             HFEngine: in process; VLLMEngine: vLLM; by default vLLM on GPUs
"""

# By verb: what is typed after it, what it does, and the options that most people set.
VERBS: dict[str, tuple[str, str, str]] = {
    "demo": (
        "[--output_dir DIR] [--resume true]",
        "Show what RLT does for a student: all stages in miniature, two minutes.",
        "",
    ),
    "configs": (
        "[NAME] [--copy DIR]",
        "List the configs of the package, show one of them, or copy it.",
        "  --copy DIR    copy it there, with the other configs of its launch line\n",
    ),
    "fit": (
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Train a teacher or a student, by the stage that the config is of.",
        RUN
        + """  --ckpt_path CHECKPOINT last or best of --output_dir, a checkpoint, or a run to start from

"""
        + MACHINE
        + """  --trainer.strategy auto             how several GPUs share the work; docs/hardware.md
  --trainer.max_steps N               optimizer steps, each of them one RL iteration
  --trainer.max_epochs N              passes over the data

"""
        + MODELS
        + """  --model.group_size 8                completions per problem, G
"""
        + REWARD
        + """  --model.optimizer.lr 1e-6
  --model.lora.rank 32                train a LoRA
  --model.micro_batch_tokens 16384    tokens per forward; bounds memory, does not change the step
  --model.gradient_checkpointing true

"""
        + DATA
        + """  --data.prompts_per_step 16          problems per optimizer step, over all processes
  --data.val_rows 0                   rows held out for validation

"""
        + SAMPLING
        + """  --rollouts.asynchronous true        sample the next step's completions while this step trains
  --checkpoint.every_n_train_steps 5  by default every 10 minutes
""",
    ),
    "validate": (
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Measure reward or loss on held-out rows, without training.",
        f"{RUN}\n{MACHINE}\n{MODELS}{REWARD}\n{DATA}"
        "  --data.val_rows N                   rows held out by seed\n"
        f"\n{SAMPLING}",
    ),
    "predict": (
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Let a teacher write a distillation set (generate), or score given explanations (score, rank).",
        f"{RUN}\n{MACHINE}\n{MODELS}{REWARD}\n{DATA}"
        """  --data.trace_columns [NAME]         columns of explanations to score, with ScoringData
  --data.student_context N            most tokens that a student will take

"""
        f"{SAMPLING}"
        """  --rollouts.num_traces 1             explanations per problem
  --rollouts.max_resamples 0          how often one that cannot be used is sampled again
  --distillation.select fits_context  which traces are taken
  --scores.per_token true             write the figures of every token
""",
    ),
    "test": (
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Evaluate a student: its accuracy on sets of problems.",
        f"{RUN}\n{MACHINE}"
        """  --model.pretrained MODEL            the student: local folder, hub id, miniature or smollm2-135m

  --data.sets '{NAME: FILE}'          sets of problems; null takes the known set of that name
  --data.max_rows N                   most problems of each set
  --data.responses FILE               judge given responses

  --rollouts.num_samples 1            responses per problem, k
"""
        f"{SAMPLING}",
    ),
    "plan": (
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Predict the memory that a run would need; nothing is loaded.",
        """  --plan.device auto                  H100, H200, A100, B200 or cpu
  --plan.device_gib GIB               memory of a device that is not in the table
  --plan.prompt_length N              longest prompt, tokens; else the limit
  --plan.completion_length N          longest completion, tokens; else the limit

and all options of rlt fit and rlt predict.
""",
    ),
    "check": (
        "--config CONFIG [--config OVERLAY ...] [--KEY VALUE ...]",
        "Check on your rows and models, before a stage, whether its run can teach anything.",
        """  --check.rows 16                     problems to sample completions of
  --check.completions 4               completions of each problem
  --check.bad_traces [NAME]           columns of traces that the reward must rank below reasoning_trace

and all options of rlt fit.
""",
    ),
    "explain": (
        "[RUN_OR_FOLDER] [--question '…' --solution '…'] [--row N] [--KEY VALUE ...]",
        "Show what an explanation is worth to a student, by term and by token.",
        """A teacher that is named writes the explanation; without one it is the row's, with a --config.

  --question, --solution TEXT         in place of a row
  --explanation TEXT                  an explanation of your own
  --row 1                             number of the row in data.source
  --top 20                            number of tokens in the table, largest KL first
  --html FILE                         also write a page with the tokens' colours

and all options of rlt predict.
""",
    ),
    "export": (
        "--ckpt_path CHECKPOINT --output_dir FOLDER",
        "Make a Hugging Face folder from a checkpoint of any strategy, on a CPU.",
        """  --dtype TYPE                        float32, bfloat16 or float16; else the run's model.dtype
  --adapter merged                    or separate: write only the LoRA
  --overwrite true                    replace a model in --output_dir
""",
    ),
    "report": (
        "RUN [--output FILE]",
        "Write one page of a run: what changed, curves, completions token by token.",
        "  --output FILE                       by default report.html in the run's folder\n",
    ),
}

# Verb -> the config that the message about a missing one proposes.
FIRST_CONFIGS = dict.fromkeys(("fit", "validate", "plan", "check"), "laptop/rlt") | {
    "predict": "laptop/generate",
    "test": "laptop/evaluate",
    "explain": "recipe_7b/rank",
}

STAGES = """The stages, in their order (`rlt configs` lists all experiments and overlays):

  rlt fit --config recipe_7b/warmup        stage 1: warm-up of the teacher
  rlt fit --config recipe_7b/rlt           stage 2: GRPO with a student's reward
  rlt predict --config recipe_7b/generate  stage 3: the teacher writes traces
  rlt fit --config recipe_7b/sft           stage 4: a student learns from them
  rlt fit --config recipe_7b/opd           stage 4b: on-policy distillation
  rlt test --config recipe_7b/evaluate     stage 5: accuracy, beside the paper's

  rlt fit --config laptop/rlt              stage 2 in miniature, half a minute
  rlt fit --config recipe_7b/grpo          traditional RL, by correct answers
  rlt fit --config recipe_7b/likelihood    thinking without a checker
  rlt predict --config recipe_7b/rank      rank your explanations by the reward
"""

FIRST_RUN = """rlt trains Reinforcement-Learned Teachers (arXiv:2506.08388). First see what
that does for a student, in two minutes on two CPU cores; then make a run of
your own, half a minute long:

  rlt demo
  rlt fit --config laptop/rlt --output_dir runs/try

Their last lines say where everything is and what to run next.
`rlt VERB --help` shows what to set:

"""


def print_main_help() -> None:
    """Print `rlt --help`: every verb and the stages."""
    print("usage: rlt VERB [--config CONFIG ...] [--KEY VALUE ...]\n")
    print("Train, apply and evaluate Reinforcement-Learned Teachers (arXiv:2506.08388).\n")
    print_verbs()
    print_wrapped(f"\n{STAGES}")


def print_verbs() -> None:
    """Print a line of every verb."""
    print_wrapped("\n".join(f"  rlt {verb:8}   {line}" for verb, (_, line, _) in VERBS.items()))


def print_verb_help(verb: str) -> None:
    """Print `rlt VERB --help`: usage, and what most people set."""
    usage, line, options = VERBS[verb]
    print_wrapped(f"usage: rlt {verb} {usage}\n\n{line}")
    if options:
        print_wrapped(f"\n{options}")
    if "--KEY VALUE" in usage:
        print(f"\nAll options: rlt {verb} --help-all; those of a class: rlt {verb} --model.help CLASS")


def print_wrapped(text: str) -> None:
    """Print text; on a terminal a line that is too long continues below its second column."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in text.splitlines():
        gap = re.match(r"  \S.*?  +", line)
        indent = " " * (gap.end() if gap else 0)
        print(textwrap.fill(line, width, subsequent_indent=indent) if 0 < width < len(line) else line)


def suggest_verb(name: str) -> str:
    """Return the message for a verb that does not exist."""
    near = ["fit"] if name in ("train", "run") else get_close_matches(name, VERBS, n=1)
    hint = f" Did you mean rlt {near[0]}?" if near else " For help type rlt --help."
    return f"A verb must be one of {', '.join(VERBS)}, but got '{name}'.{hint}"


def require_config(verb: str, words: Sequence[str]) -> None:
    """Check that a config, or the class of a module, is among the words after a verb that needs one.

    Raises:
        InputError: If there is neither; a teacher, in `rlt explain`, and what only shows settings need none.
    """
    shows = any(word.startswith(("--help", "--print_config")) or ".help" in word for word in words)
    named = any(word.startswith(("--config", "-c", "--model")) for word in words)
    named |= verb == "explain" and bool(words) and not words[0].startswith("-")
    if verb in FIRST_CONFIGS and not (named or shows):
        raise InputError(f"--config is missing; try --config {FIRST_CONFIGS[verb]}. `rlt configs` lists all.")


def suggest_option(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean X?` for a misspelled option; nothing if no option is like it.

    A right last part is enough: `lr` means `model.optimizer.lr`.

    Args:
        name: Without dashes, such as `model.group_sise`.
        known: The options that exist.
    """

    def measure_likeness(option: str) -> float:
        if name.rpartition(".")[2] == option.rpartition(".")[2]:
            return 0.99
        return SequenceMatcher(None, name, option).ratio()

    best = max(known, key=lambda option: (measure_likeness(option), -len(option)), default="")
    return f" Did you mean {best}?" if best and measure_likeness(best) > 0.75 else ""
