"""Turn the results of the calls into the tables of research/gpu.md, and name what fell short of predictions.

    scripts/gpu_minutes.sh report results.jsonl [results.jsonl ...]

If a check was noted more than once, its last line counts, unless that was skipped for lack of time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from findings import read_findings

NOMINAL_TFLOPS = 989.0  # bf16 products of an H100 SXM, by its data sheet
SMOLLM2_ON_CPU = "On a CPU the mean reward of smollm2 went from −10.90 to −6.47, on 256 other problems."
PEAKS = ("sample", "score", "optimise")
Finding = dict[str, Any]


class Prediction(NamedTuple):
    """What a figure was predicted to be at least, before anything had run."""

    check: str
    figure: str
    least: float


PREDICTIONS = (
    Prediction("phases, qwen2.5-0.5b, bf16, Liger", "mfu", 0.33),
    Prediction("phases, qwen2.5-1.5b, bf16, Liger", "mfu", 0.44),
    Prediction("phases, 7b LoRA, bf16-mixed, Liger, checkpointing", "mfu", 0.50),
    Prediction("phases, qwen2.5-0.5b, bf16, checkpointing", "mfu", 0.21),
    Prediction("phases, qwen2.5-1.5b, bf16, checkpointing", "mfu", 0.32),
    Prediction("phases, 7b LoRA, bf16-mixed, checkpointing", "mfu", 0.45),
    Prediction("engine, qwen2.5-0.5b, 64 rows", "tokens_per_s", 3_000),
    Prediction("engine, qwen2.5-0.5b, 256 rows", "tokens_per_s", 12_000),
)


def last_findings(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return one finding for each check, in the order in which they first came."""
    found: dict[str, Finding] = {}
    for finding in findings:
        before = found.get(finding["check"])
        if before is None or is_skipped(before) or not is_skipped(finding):
            found[finding["check"]] = finding
    return found


def is_skipped(finding: Finding) -> bool:
    return str(finding.get("why", "")).startswith("skipped")


def number(value: Any, digits: int = 3) -> str:
    """Return a figure with three digits; nothing for none."""
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.0f}" if size >= 100 else f"{value:.{digits}g}"
    return "" if value is None else str(value)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; nothing without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"
    )


def outcome(finding: Finding) -> str:
    words = {True: "passed", False: "**failed**", None: "skipped" if is_skipped(finding) else "measured"}
    return words[finding["passed"]]


def checks_table(found: dict[str, Finding]) -> str:
    """Return every check that passed or failed, with its time and why it failed; numerics are counted."""
    rows = [
        [name, outcome(f), number(f.get("s")), str(f.get("why", ""))]
        for name, f in found.items()
        if f["passed"] is False or (f["passed"] and ("s" in f or "first step" in name))
    ]
    counted = sum(f["passed"] is True and "bound" in f for f in found.values())
    text = f"\n{counted} comparisons of numbers were within their bounds.\n" if counted else ""
    return table(["check", "outcome", "s", "why"], rows) + text


def phases_table(found: dict[str, Finding]) -> str:
    """Return the phases, with MFU of the measured and of the nominal rate of products."""
    rate = found.get("ceilings", {}).get("tflops")
    rows = []
    for name, f in found.items():
        if not name.startswith("phases, "):
            continue
        label = name.removeprefix("phases, ")
        if "mfu" not in f:
            rows.append([label, *[""] * 5, str(f.get("why", ""))])
            continue
        nominal = f["mfu"] * rate / NOMINAL_TFLOPS if rate else None
        rows.append([
            label, number(f["optimise_s"]), f"{percent(f['mfu'])}, {percent(nominal)}", number(f["score_s"]),
            percent(f["score_mfu"]), number(f["peak_gib"]), "",
        ])  # fmt: skip
    head = [
        "shape, options",
        "optimise, s",
        "MFU of measured, of nominal",
        "score, s",
        "MFU",
        "peak, GiB",
        "",
    ]
    return table(head, rows)


def figures_table(found: dict[str, Finding], prefix: str, figures: dict[str, str]) -> str:
    """Return the checks whose names begin so, with some of their figures."""
    rows = [
        [name.removeprefix(prefix), *(number(f.get(key)) for key in figures), str(f.get("why", ""))]
        for name, f in found.items()
        if name.startswith(prefix)
    ]
    return table(["", *figures.values(), ""], rows)


def profile_table(found: dict[str, Finding]) -> str:
    """Return the part of each kind of kernel in the GPU's time."""
    profiles = {
        name: f for name, f in found.items() if name.startswith("profile, ") and "gpu_ms_by_kind" in f
    }
    kinds = dict.fromkeys(kind for f in profiles.values() for kind in f["gpu_ms_by_kind"])
    rows = []
    for name, f in profiles.items():
        times = f["gpu_ms_by_kind"]
        busy = sum(times.values())
        parts = [percent(times[kind] / busy) if kind in times else "" for kind in kinds]
        calls = f["calls"].get("kernels", "")
        rows.append(
            [name.removeprefix("profile, "), number(f["seconds"] * 1e3), number(busy), *parts, str(calls)]
        )
    return table(["", "ms", "GPU busy, ms", *kinds, "kernels"], rows)


def curves_table(found: dict[str, Finding]) -> str:
    """Return the mean reward (or loss) of the first and the last quarter of each run, and a step's time."""
    rows = []
    for name, f in found.items():
        curve = f.get("reward") or f.get("loss")
        if not name.startswith("curve, ") or not curve:
            continue
        quarter = max(1, len(curve) // 4)
        first, last = (sum(part) / quarter for part in (curve[:quarter], curve[-quarter:]))
        times = [median(f[key]) if f.get(key) else None for key in ("generate_s", "score_s", "train_s")]
        what = "reward" if f.get("reward") else "loss"
        change = f"{what} {first:.3g} → {last:.3g}"
        rows.append([name.removeprefix("curve, "), str(f["steps"]), change, *map(number, times)])
    text = table(["run", "steps", "first → last quarter", "generate, s", "score, s", "train, s"], rows)
    return text + (f"\n{SMOLLM2_ON_CPU}\n" if "curve, smollm2" in found else "")


def card_table(found: dict[str, Finding]) -> str:
    """Return what phases took with hardware/1gpu_80gb, and their memory beside the plan's."""
    rows = []
    for name, f in found.items():
        if not name.startswith("own, ") or "perf/train_s" not in f:
            continue
        planned, update = f.get("planned_gib") or {}, (f.get("update_s") or [0.0])[-1]
        peaks = [
            f"{number(f[f'perf/{phase}_peak_gib'])}, {number(planned.get(plan))}"
            for phase, plan in (("generate", "generate"), ("score", "score"), ("train", "train"))
        ]
        times = [f["perf/generate_s"], f["perf/score_s"], f["perf/train_s"] - update, update]
        per_token = 1e3 * f["perf/generate_s"] / f["tokens"]
        rows.append([name.removeprefix("own, "), *map(number, times), number(per_token), *peaks])
    head = ["", "sample, s", "score, s", "optimise, s", "update, s", "ms a token step"]
    return table([*head, *(f"{phase}: GiB, planned" for phase in PEAKS)], rows)


def finding_table(found: dict[str, Finding]) -> str:
    """Return the students' accuracies by arm and seed."""
    rows = []
    for name, f in found.items():
        if name.startswith("finding, ") and "accuracy" in f:
            kinds = [" / ".join(f"{value:.0f}" for value in kind.values()) for kind in f["kinds"]]
            scores = [", ".join(f"{value:.1f}" for value in f[key]) for key in ("accuracy", "greedy")]
            seeds = ", ".join(map(str, f["seeds"]))
            rows.append([name.removeprefix("finding, "), seeds, *scores, "; ".join(kinds)])
    return table(["student of", "seeds", "T 0.7, %", "greedy, %", "traces, % by kind"], rows)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def shortfalls(found: dict[str, Finding]) -> list[str]:
    """Return a sentence for each prediction that did not come true, or was not measured."""
    lines = []
    for check, figure, least in PREDICTIONS:
        value = found.get(check, {}).get(figure)
        if value is None:
            why = found.get(check, {}).get("why", "not reached")
            lines.append(f"{check}: not measured ({why}); predicted {figure} {least:,g}.")
        elif value < least:
            lines.append(f"{check}: {figure} {number(value)}, predicted {least:,g}.")
    return lines


def report(findings: Iterable[Finding]) -> str:
    """Return all tables."""
    found = last_findings(findings)
    versions = found.get("versions", {})
    words = [f"{key} {value}" for key, value in versions.items() if key not in ("check", "passed", "missing")]
    ceilings = found.get("ceilings", {})
    if "tflops" in ceilings:
        words.append(f"products {ceilings['tflops']:.0f} TFLOP/s, copies {ceilings['copy_gb_s']:,.0f} GB/s")
    names = {"forward_ms": "forward, ms", "forward_tflops": "TFLOP/s", "both_ms": "with backward, ms"}
    heads = {"ms": "ms", "forward_ms": "forward, ms", "tflops": "TFLOP/s", "peak_gib": "peak, GiB"}
    rates = {
        "tokens_per_s": "tokens/s",
        "ms_per_token_step": "ms a token step",
        "gpu_ms_per_step": "of these the GPU computes",
        "kernels_per_step": "kernels a step",
    }
    sections: dict[str, Callable[[], str]] = {
        "Checks": lambda: checks_table(found),
        "Runs": lambda: curves_table(found),
        "Phases, 16k tokens": lambda: phases_table(found),
        "Attention": lambda: figures_table(found, "attention ", names | {"both_tflops": "TFLOP/s"}),
        "Head": lambda: figures_table(found, "head ", heads),
        "Engine": lambda: figures_table(found, "engine, ", rates),
        "Kernels of the optimise phase": lambda: profile_table(found),
        "hardware/1gpu_80gb with the in-process engine": lambda: card_table(found),
        "The finding with SmolLM2": lambda: finding_table(found),
        "Own rows with SmolLM2: students": lambda: figures_table(
            found,
            "own rows, student of ",
            {"problems": "problems", "greedy": "greedy, %", "sampled": "T 0.7, %"},
        ),
        "Own rows with SmolLM2: stages": lambda: figures_table(
            found,
            "own rows, stage ",
            {"seconds": "s", "sampled": "tokens sampled", "trained": "tokens trained"},
        ),
        "Copies of a push": lambda: figures_table(found, "weights through ", {"gb_per_s": "GB/s"}),
    }
    parts = [", ".join(words) + ".\n"]
    parts += [f"### {title}\n\n{text}" for title, make in sections.items() if (text := make())]
    short = shortfalls(found)
    parts.append("### What fell short\n\n" + ("".join(f"* {line}\n" for line in short) or "Nothing.\n"))
    return "\n".join(parts)


def main() -> None:
    print(report(read_findings(*map(Path, sys.argv[1:]))))


if __name__ == "__main__":
    main()
