"""What `rlt --help` and `rlt VERB --help` print, at once, without importing PyTorch."""

from __future__ import annotations

import argparse

from rlt_lightning.run import __version__

# By verb: what it does, then an example and what most people set. Lines fit into 80 columns.
VERBS = {
    "demo": """Show where only a teacher helps a student, in miniature: some minutes.

  rlt demo [--output_dir DIR]
""",
    "configs": """List the configs of the package, or show one of them.

  rlt configs
  rlt configs laptop/rlt > my.yaml
""",
    "fit": """Train a teacher or a student, by the stage that the config is of.

  rlt fit --config laptop/rlt --output_dir runs/try --trainer.max_steps 10

A config is a name (rlt configs) or a YAML file; a later one wins. All settings
of this run, as YAML: add --print_config. Those of a class: --model.help CLASS.
Every option with its meaning: --help-all.

  --output_dir DIR             run folder; runs/<config>-<time> by default
  --resume true                resume the run there; start it if there is none
  --overwrite true             replace the run there
  --trainer.devices auto       number of processes, a GPU each
  --trainer.max_steps N        optimizer steps; --trainer.max_epochs: passes
  --model.teacher MODEL        local folder, hub id, miniature or smollm2-135m
  --model.student MODEL        frozen student that scores; any tokenizer
  --model.pretrained MODEL     the model of the other stages
  --model.micro_batch_tokens N tokens per forward: bounds memory, not the step
  --data.source SOURCE         file, folder, hub id or embedded task
  --data.prompts_per_step 16   problems per optimizer step, of all processes
  --rollouts.sampling.max_completion_length 16384
""",
    "validate": """Measure reward or loss on held-out rows, without training.

  rlt validate --config laptop/rlt --data.val_rows 64

Options: those of rlt fit.
""",
    "predict": """Let a teacher write a distillation set, or score given explanations.

  rlt predict --config laptop/generate --model.teacher runs/try/model

  --data.trace_columns [NAME]         columns to score, with ScoringData
  --data.student_context N            most tokens that a student will take
  --rollouts.num_traces 1             explanations per problem
  --distillation.select fits_context  which explanations are taken

Other options: those of rlt fit.
""",
    "test": """Evaluate a student: its accuracy on sets of problems.

  rlt test --config laptop/evaluate --model.pretrained runs/student/model

  --data.sets '{NAME: FILE}'   sets of problems; null takes a known set
  --data.max_rows N            most problems of each set
  --rollouts.num_samples 1     responses per problem

Other options: those of rlt fit for run, machine and sampling.
""",
    "plan": """Predict memory, disk and hours of a run; nothing is loaded.

  rlt plan --config recipe_7b/rlt --config hardware/zero3_8gpu

  --plan.device_gib GIB        memory of a device; an H100's by default
  --plan.prompt_length N       longest prompt, tokens; else the limit

Other options: those of rlt fit.
""",
    "check": """Check on your rows and models whether a run of rlt fit can teach anything.

  rlt check --config own_rows/rlt --data.source rows.jsonl

  --check.rows 16              problems to sample completions of
  --check.completions 4        completions of each problem

Other options: those of rlt fit.
""",
    "explain": """Show what an explanation is worth to a student, by term and by token.

  rlt explain runs/try --question '1 + 1?' --solution 2 --student miniature

The run, model folder or hub id that is named first writes the explanation.

  --student MODEL              frozen student; without it nothing is scored
  --student_system_prompt TEXT what it was trained with, if no file says it
  --explanation TEXT           an explanation of your own
  --seed 0                     another seed samples another explanation
  --reward.KEY, --sampling.KEY options of RLTReward and of Sampling
""",
    "export": """Make a Hugging Face folder from a checkpoint of any strategy, on a CPU.

  rlt export --ckpt_path CHECKPOINT --output_dir FOLDER

  --dtype TYPE                 float32, bfloat16 or float16
  --adapter merged             or separate: write only the LoRA
  --overwrite true             replace a model in --output_dir
""",
    "report": """Write one page of a run: what changed, curves, completions.

  rlt report RUN [--output FILE]
""",
}

STAGES = """First see what RLT does for a student, then make a run of your own:

  rlt demo                                 some minutes on two CPU cores
  rlt fit --config laptop/rlt              stage 2 in miniature, half a minute

The stages, in their order:

  rlt fit --config recipe_7b/warmup        stage 1: warm-up of the teacher
  rlt fit --config recipe_7b/rlt           stage 2: GRPO, a student's reward
  rlt predict --config recipe_7b/generate  stage 3: the teacher explains
  rlt fit --config recipe_7b/sft           stage 4: a student learns from it
  rlt fit --config recipe_7b/opd           stage 4b: on-policy distillation
  rlt test --config recipe_7b/evaluate     stage 5: accuracy

rlt VERB --help shows what to set.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of verbs and their help texts; each verb has another one for its options."""
    raw = argparse.RawDescriptionHelpFormatter
    about = "Train, apply and evaluate Reinforcement-Learned Teachers (arXiv:2506.08388)."
    parser = argparse.ArgumentParser("rlt", description=about, epilog=STAGES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"rlt {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, text in VERBS.items():
        line = text.partition("\n")[0]
        verbs.add_parser(verb, help=line, description=text, formatter_class=raw, allow_abbrev=False)
    return parser
