"""The paper's finding in miniature, with every control: `make finding`. `rlt demo` runs five arms of filler.

    python research/finding.py --output_dir DIR     # make finding: all arms, three seeds, variations
    python research/finding.py --output_dir DIR --arms "warmup rlt" --variations pieces_student
    python research/finding.py --output_dir DIR --setting filler --arms "warmup warmup_t0 best_of_equal rlt"

arms.py describes the arms. A variation changes one thing of the setting, and is compared in the arms warmup,
warmup_t0, best_of_equal and rlt; `--variations` runs the named ones with every seed. The variations of filler
include a grid of hazards and group sizes, such as hazard_0.85_group_32. Run it again after a crash: finished
stages are skipped, and the interrupted one resumes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from arms import ARMS, FURTHER, MAINS, MINIATURES, VARIATIONS, Arms, Setting
from figures import NAMES, WITHOUT_RL, collect, compute_difference, list_failures
from jobs import Job, make_folder, read_arms, read_seeds, run_arms
from plots import draw
from stages import StageError, Stages
from tables import build_tables, show_explanations, write_results

from rlt_lightning.types import InputError

RANKED_BY: dict[str, dict[str, object]] = {  # rewards by which the warm-up teacher's traces are grouped
    "groups": {},
    "groups_solution_only": {"model__reward__kl_weight": 0},
    "groups_kl_only": {"model__reward__solution_weight": 0},
}
NEXT = """
Next:
  make finding-smollm2     the same with SmolLM2-135M: an hour or more
  docs/data.md         a task and a model of your own
  docs/pipeline.md         all stages with SmolLM2, and with a 7B teacher on 8 GPUs"""


def main() -> int:
    """Run what is asked for; return 1 if a stage fails or the finding does not show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="", help="such as '10 11 12'; '0 1 2' by default")
    parser.add_argument("--arms", default="", help="such as 'warmup rlt'; all by default, and variations")
    parser.add_argument(
        "--variations",
        default="",
        help="such as 'pieces_student', run with every seed; by default, most once",
    )
    parser.add_argument("--setting", choices=MAINS, default="main", help="what all arms share")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    try:
        setting = MAINS[options.setting]
        own = f"lambda_{setting.kl_weight:g}"  # this is rlt
        arms = read_arms([options.arms], [arm for arm in ARMS if arm != own])
        seeds = read_seeds([options.seeds], (0, 1, 2))
        named, known = options.variations.split(), VARIATIONS | FURTHER
        if unknown := [name for name in named if name not in known]:
            raise InputError(
                f"--variations may name {', '.join(known)}, but names {', '.join(unknown)}. Correct it."
            )
        whole = not options.arms
        usual = choose_variations(seeds) if whole and options.setting == "main" else {}
        varied = {known[name]: seeds for name in named} or usual
        return run(make_folder(options.output_dir), setting, seeds, arms, varied, whole)
    except (InputError, StageError) as error:
        print(f"finding: {error}", file=sys.stderr)
        return 1


def choose_variations(seeds: list[int]) -> dict[Setting, list[int]]:
    """Return the seeds of each variation: all for a base of its own; the others vary one thing."""
    other = MINIATURES["seed1"]
    return {setting: seeds if setting.base == other else seeds[:1] for setting in VARIATIONS.values()}


def run(
    folder: Path,
    setting: Setting,
    seeds: list[int],
    arms: list[str],
    varied: dict[Setting, list[int]],
    whole: bool,
) -> int:
    """Run the arms for all seeds, variations for theirs and, if `whole`, groups; show what came out."""
    stages = Stages(folder)
    mains = [Arms(stages, setting, seed) for seed in seeds]
    others = [Arms(stages, setting, seed) for setting, some in varied.items() for seed in some]
    print("importing, then warming the teachers up: half a minute or more until the first line", flush=True)
    others, seconds = run_arms(stages, mains, arms, others, list_group_jobs(mains) if whole else ())
    figures = {"setting": setting.name, **collect(mains, others, arms, whole, seconds)}
    report = write_results(figures, mains[0])
    draw(figures, mains, folder / "finding.svg")
    show_explanations(mains[0])
    print(f"\n{build_tables(figures)}")
    print(f"{seconds:.0f} s. Figures: {folder / 'finding.json'}, tables: {folder / 'finding.md'}")
    print(f"Picture: {folder / 'finding.svg'}" + (f", curves: {report}" if report else ""))
    wrong = list_failures(figures)
    for sentence in wrong:
        print(f"finding: the finding does not hold: {sentence}.", file=sys.stderr)
    if not wrong and {"warmup", "rlt"} <= set(arms):
        for how, name in (("accuracy", "at T 0.7"), ("greedy", "greedily")):
            for arm in (arm for arm in WITHOUT_RL if arm in arms):
                mean, half = compute_difference(figures["arms"], "rlt", arm, how)
                print(f"RLT's students, {name}: {mean:+.1f} ± {half:.1f} points against {NAMES[arm]}.")
    print(NEXT)
    return bool(wrong)


def list_group_jobs(mains: list[Arms]) -> list[Job]:
    """Return the jobs that rank traces and train students of the groups: by each term for the first seed."""

    def job(one: Arms, by: dict[str, dict[str, object]]) -> Job:
        return lambda: one.all_groups(by)

    return [job(one, RANKED_BY if one is mains[0] else {"groups": {}}) for one in mains]


if __name__ == "__main__":
    sys.exit(main())
