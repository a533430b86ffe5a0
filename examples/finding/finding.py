"""The paper's finding in miniature: a student learns because its teacher was trained by RLT.

    python examples/finding/finding.py --quick          # make quickstart: three arms, one seed
    python examples/finding/finding.py                  # make finding: all arms, three seeds, variations
    python examples/finding/finding.py --arms "warmup rlt" --variations pieces_student    # it with every seed

A model of 184,000 parameters is teacher, frozen student and student. For each seed the teacher is warmed up
on traces of uneven quality. Each arm then makes 512 traces in its own way, and a student learns from them:

    warmup         by the warm-up teacher
    rlt            by that teacher after 40 iterations of RLT
    solution_only  the same without r_KL (lambda 0)
    kl_only        the same without r_SS
    shuffled       the same with advantages shuffled within each group: nothing to learn from
    lambda_N       the same with weight N of r_KL instead of 3
    best_of_4      by the warm-up teacher, the best of four by the same reward
    raw            traces like those of the warm-up
    oracle         traces with all steps right

All stages are `rlt` commands, with one setting for all arms. Run it again after a crash: finished stages are
skipped, and the one that was broken off resumes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from arms import ARMS, FURTHER, QUICK_ARMS, TRAINED, VARIATIONS, Arms, Setting
from stages import StageError, Stages

RANKED_BY: dict[str, dict[str, object]] = {  # rewards by which the warm-up teacher's traces are grouped
    "groups": {},
    "groups_solution_only": {"model__reward__kl_weight": 0},
    "groups_kl_only": {"model__reward__solution_weight": 0},
}


def main() -> int:
    """Run what is asked for; return 1 if a stage fails or the finding does not show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three arms, one seed, no variations")
    parser.add_argument("--seeds", default="", help="such as '10 11 12'; '0 1 2' by default, '0' if quick")
    parser.add_argument("--arms", default="", help="such as 'warmup rlt'; all by default, and variations")
    parser.add_argument(
        "--variations",
        default="",
        help="such as 'pieces_student', run with every seed; by default, most once",
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    arms = options.arms.split() or list(QUICK_ARMS if options.quick else ARMS)
    named = options.variations.split()
    whole = not options.quick and not options.arms
    try:
        if unknown := [arm for arm in arms if arm not in ARMS]:
            raise StageError(f"ARMS may name {', '.join(ARMS)}, but names {', '.join(unknown)}. Correct it.")
        known = VARIATIONS | FURTHER
        if unknown := [name for name in named if name not in known]:
            raise StageError(
                f"VARIATIONS may name {', '.join(known)}, but names {', '.join(unknown)}. Correct it."
            )
        words = options.seeds.split() or (["0"] if options.quick else ["0", "1", "2"])
        if odd := [word for word in words if not word.isdecimal()]:
            raise StageError(
                f"SEEDS must be numbers such as '0 1 2', but names {', '.join(odd)}. Correct it."
            )
        seeds = sorted(set(map(int, words)))
        varied = {known[name]: seeds for name in named} or (usual_variations(seeds) if whole else {})
        return run(options.output_dir, seeds, arms, varied, whole)
    except StageError as error:
        print(f"finding: {error}", file=sys.stderr)
        return 1


def usual_variations(seeds: list[int]) -> dict[Setting, list[int]]:
    """Return the seeds of each variation: all for a base of its own; the others vary one thing."""
    return {
        setting: seeds if setting.base == "miniature-seed1" else seeds[:1] for setting in VARIATIONS.values()
    }


def run(
    folder: Path, seeds: list[int], arms: list[str], varied: dict[Setting, list[int]], whole: bool
) -> int:
    """Run the arms for all seeds, variations for theirs and, if `whole`, groups; show what came out."""
    begin = time.perf_counter()
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StageError(
            f"OUT must be a folder that can be written, but {folder} is not ({error})."
        ) from error
    clock = folder / "seconds"  # of earlier runs that were broken off
    before = float(clock.read_text()) if clock.exists() else 0.0
    stages = Stages(folder)
    stages.start()
    mains = [Arms(stages, Setting(), seed) for seed in seeds]
    others = [Arms(stages, setting, seed) for setting, some in varied.items() for seed in some]
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def side_by_side(jobs: Iterable[Callable[[], object]]) -> None:
            for done in as_completed([pool.submit(job) for job in jobs]):
                if done.exception() is not None:
                    pool.shutdown(wait=True, cancel_futures=True)
                done.result()
                scratch = clock.with_suffix(".tmp")  # a kill leaves no half number
                scratch.write_text(f"{before + time.perf_counter() - begin:.1f}")
                scratch.replace(clock)

        print(
            "importing, then warming the teachers up: half a minute or more until the first line", flush=True
        )
        side_by_side(one.prepare for one in [*mains, *others])
        if failed := [one.name for one in mains if not one.passes_gates()]:
            raise StageError(f"Every gate must hold, but not all do for {', '.join(failed)}; see above.")
        others = [one for one in others if one.passes_gates()]
        print("all other stages, one line as each ends", flush=True)
        side_by_side(jobs(mains, others, arms, whole))
    from page import show

    return show(folder, mains, others, arms, whole, before + time.perf_counter() - begin)


def jobs(mains: list[Arms], others: list[Arms], arms: list[str], whole: bool) -> list[Callable[[], object]]:
    """Return the jobs that can run side by side, the longest first."""
    found: list[Callable[[], object]] = []
    if whole:
        for one in mains:
            by = RANKED_BY if one is mains[0] else {"groups": {}}
            found.append(lambda one=one, by=by: one.all_groups(by))
    trained_first = sorted(arms, key=lambda arm: arm not in TRAINED)
    some = [(one, arm) for arm in trained_first for one in mains]
    some += [(one, arm) for one in others for arm in ("rlt", "warmup")]
    for one, arm in some:
        samples = one is mains[0] and arm in QUICK_ARMS
        found.append(lambda one=one, arm=arm, samples=samples: one.arm(arm, samples))
    return found


if __name__ == "__main__":
    sys.exit(main())
