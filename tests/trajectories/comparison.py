"""Compare a trajectory with the committed one: to the last digit, within a tolerance, and on average.

    same versions, processor, threads   every figure is equal in all DIGITS digits that the file holds
    anything else                       |residual| <= tolerance, and the mean residual of a run, and of all
                                        weights at its end, is 0 within its error

So a constant offset cannot hide below the tolerance. A difference that grows along a run is noticed once it
exceeds the tolerance. A residual is (found - wanted) / scale. The scale of a figure is its largest absolute
value in the run, since a loss that passes through 0 has no relative precision there.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from importlib.metadata import version
from pathlib import Path

import torch
from trajectories.runs import FOLDER, Trajectory

DIGITS = 9  # as many as tell all fp32 numbers apart
TOLERANCE = 1e-5
# Where a kernel forces more. Behind each: the largest residual with other kernels than the committed ones,
# those of PyTorch and MKL for AVX2 and for any x86-64. All other figures stayed within 4e-6.
TOLERANCES = {
    # k3 of log-ratios near 0 is their square, and has half of their digits.
    "policy/kl_ref": 5e-4,  # 5.4e-5
    # exp of log-ratios, squared and summed; the largest of a step's differences.
    "rollout/effective_sample_frac": 1e-4,  # 1.3e-5
    "rollout/mismatch_max": 1e-4,  # 1.1e-5
    # A step's gradient is a small difference of large ones.
    "policy/grad_norm": 7e-5,  # 1.7e-5
    # AdamW's first steps follow the signs of gradients, and some gradients are nearly 0.
    "moved/": 1e-4,  # 2.6e-5
    "lora_B": 1e-4,  # 1.5e-5: a matrix that began as 0
}
# Rounding adds up along a run, and gives its residuals a mean of its own. Up to this part of the tolerance it
# is no bias.
ROUNDING = 0.2
ERRORS = 5.0  # a mean residual of so many standard errors is a bias
WEIGHT, MOVED = "weight/", "moved/"
# The size of what is added up, where terms cancel: their rounding does not.
SIZES = {
    "policy/loss": 1.0,  # advantages of a group add up to 0
    "rollout/mismatch": 10.0,  # between log-probs of trainer and engine, which are as low as -10 nats
}


def name_of_file(kind: str, strategy: str = "") -> Path:
    """Return the file of a committed trajectory."""
    return FOLDER / "committed" / f"{kind}{'_' if strategy else ''}{strategy}.json"


def describe_machine() -> dict[str, str]:
    """Return what the last digits of a run depend on."""
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "processor": f"{platform.machine()} {read_processor()}",
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def read_processor() -> str:
    """Return the processor's name and model."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    entries = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return " ".join(entries.get(name, "?") for name in ("model name", "cpu family", "model"))


def round_digits(value: float) -> float:
    """Return the number as a file holds it."""
    return float(f"{value:.{DIGITS}g}")


def transpose(trajectory: Trajectory) -> dict[str, list[float]]:
    """Return the values of each figure over the steps, which all have the same, and of each weight one."""
    columns = {name: [step[name] for step in trajectory.steps] for name in trajectory.steps[0]}
    columns |= {WEIGHT + name: [norm] for name, norm in trajectory.weights.items()}
    columns |= {MOVED + name: [norm] for name, norm in trajectory.moved.items()}
    return {name: [round_digits(value) for value in values] for name, values in columns.items()}


def write(path: Path, trajectory: Trajectory) -> None:
    """Commit a trajectory: a line for each figure."""
    path.parent.mkdir(exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in transpose(trajectory).items()]
    machine = json.dumps(describe_machine())
    path.write_text(f'{{"machine": {machine},\n"figures": {{\n' + ",\n".join(lines) + "\n}}\n")


def read(path: Path) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the figures of a committed trajectory, and the machine that wrote it."""
    content = json.loads(path.read_text())
    return content["figures"], content["machine"]


def choose(table: dict[str, float], name: str, default: float) -> float:
    """Return the entry of a table whose key is part of a figure's name."""
    return next((value for key, value in table.items() if key in name), default)


def find_residuals(wanted: dict[str, list[float]], found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return (found - wanted) / scale of each figure, step by step.

    Raises:
        AssertionError: If a figure is gone or has another number of steps. A new one is not compared.
    """
    missing = sorted(wanted.keys() - found.keys())
    assert not missing, f"figures are gone: {', '.join(missing)}"
    residuals = {}
    for name, values in wanted.items():
        assert len(values) == len(found[name]), f"{name}: {len(found[name])} steps, not {len(values)}"
        scale = max(*map(abs, values), choose(SIZES, name, 0.0)) or 1.0
        residuals[name] = [(b - a) / scale for a, b in zip(values, found[name], strict=True)]
    return residuals


def find_differences(residuals: dict[str, list[float]]) -> list[str]:
    """Return a line for each figure that is off by more than its tolerance, or biased."""
    lines = []
    for name, values in residuals.items():
        tolerance = choose(TOLERANCES, name, TOLERANCE)
        far = {step: value for step, value in enumerate(values, 1) if not abs(value) <= tolerance}
        if far:
            step, value = max(far.items(), key=lambda item: abs(item[1]))
            lines.append(f"{name}: off by {value:.2g} in step {step}")
        elif is_biased(values, ROUNDING * tolerance):
            lines.append(f"{name}: off by {statistics.mean(values):.2g} on average")
    weights = [values[0] for name, values in residuals.items() if name.startswith(WEIGHT)]
    if is_biased(weights, ROUNDING * TOLERANCE):
        lines.append(f"all weights: off by {statistics.mean(weights):.2g} on average")
    return lines


def is_biased(residuals: list[float], rounding: float) -> bool:
    """Return whether the mean of a run's residuals is not 0 within its error and a rounding."""
    if len(residuals) < 2:
        return False
    error = statistics.stdev(residuals) / math.sqrt(len(residuals))
    return abs(statistics.mean(residuals)) > ERRORS * error + rounding
