"""Run arms of several seeds in parallel, and record how long they took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from arms import ARMS, LEAD, SAMPLED_ARMS, TRAINED, Arms
from stages import StageError, Stages

from rlt_lightning.run.jsonl import rewrite
from rlt_lightning.types import InputError

Job = Callable[[], object]
CLOCK = "seconds"  # file with what earlier starts took that were broken off


def run_arms(
    stages: Stages,
    mains: list[Arms],
    arms: Sequence[str],
    others: Sequence[Arms] = (),
    more: Sequence[Job] = (),
) -> tuple[list[Arms], float]:
    """Run the stages of arms for several seeds, as many side by side as there are cores.

    Args:
        stages: Runs the stages.
        mains: One per seed.
        arms: Names of arms.
        others: Settings that are compared in the arms of `LEAD` only.
        more: Further jobs; they begin first, since they take longest.

    Returns:
        Those of `others` whose gates hold, and the seconds of this start and of earlier ones.

    Raises:
        StageError: If a stage fails, or a gate of `mains` does not hold.
    """
    clock = Clock(stages.folder / CLOCK)
    stages.start()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def run_side_by_side(jobs: Iterable[Job]) -> None:
            try:
                for done in as_completed([pool.submit(job) for job in jobs]):
                    done.result()
                    clock.write()
            except BaseException:  # Ctrl-C too
                pool.shutdown(wait=False, cancel_futures=True)
                stages.stop()
                raise

        run_side_by_side(one.prepare for one in [*mains, *others])
        if failed := [one.name for one in mains if not one.passes_gates()]:
            raise StageError(f"Every gate must hold, but not all do for {', '.join(failed)}; see above.")
        passed = [one for one in others if one.passes_gates()]
        run_side_by_side([*more, *list_jobs(mains, passed, arms)])
    return passed, clock.read()


def list_jobs(mains: list[Arms], others: list[Arms], arms: Sequence[str]) -> list[Job]:
    """Return the jobs that can run side by side, the longest first."""
    trained_first = sorted(arms, key=lambda arm: arm not in TRAINED)
    some = [(one, arm) for arm in trained_first for one in mains]
    some += [(one, arm) for one in others for arm in LEAD]

    def job(one: Arms, arm: str) -> Job:
        return lambda: one.run_arm(arm, samples=one is mains[0] and arm in SAMPLED_ARMS)

    return [job(one, arm) for one, arm in some]


class Clock:
    """Seconds that a run has taken, over all its starts.

    Args:
        path: File that keeps them.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.begin = path, time.perf_counter()
        self.before = float(path.read_text()) if path.exists() else 0.0

    def read(self) -> float:
        """Return the seconds so far."""
        return self.before + time.perf_counter() - self.begin

    def write(self) -> None:
        """Keep the seconds so far; a kill leaves no half number."""
        rewrite(self.path, [f"{self.read():.1f}"])


def make_folder(folder: Path) -> Path:
    """Make the folder of a run and return its absolute path."""
    folder = folder.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_arms(words: list[str], default: Sequence[str]) -> list[str]:
    """Return the named arms, or the default if none is named.

    Raises:
        InputError: If there is no such arm.
    """
    names = " ".join(words).split() or list(default)
    if unknown := [name for name in names if name not in ARMS]:
        raise InputError(f"--arms may name {', '.join(ARMS)}, but names {', '.join(unknown)}. Correct it.")
    return list(dict.fromkeys(names))


def read_seeds(words: list[str], default: Sequence[int]) -> list[int]:
    """Return the named seeds in order, each once, or the default if none is named.

    Raises:
        InputError: If one is no number.
    """
    names = " ".join(words).split()
    if odd := [name for name in names if not name.isdecimal()]:
        raise InputError(f"--seeds must be numbers such as 0 1 2, but names {', '.join(odd)}. Correct it.")
    return sorted(set(map(int, names))) or list(default)
