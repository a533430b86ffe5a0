"""Worked arithmetic problems from a seed: `python research/arithmetic.py FOLDER` writes small sums."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from random import Random

from rlt_lightning.tasks.draw import draw_different

NAMES = (  # noqa: SIM905
    "Ada Bruno Chen Dalia Emil Farah Goran Hana Ivo Jana Kofi Lena Mina Noor Otto Priya Quinn Rosa Samir "
    "Tilda Uma Viktor Wanda Yusuf"
).split(" ")
THINGS = (  # noqa: SIM905
    "apples books candles drawings eggs feathers grapes hats jars kites lemons marbles nails oranges pencils "
    "ribbons shells tickets umbrellas stamps bricks buttons pears stones"
).split(" ")
VEHICLES = ("train", "bus", "cyclist", "tram", "ferry", "truck")

Worked = tuple[str, str, str]  # question, reasoning trace, answer


def arithmetic_rows(
    num_rows: int, seed: int = 0, split: str = "train", kind: str | None = None
) -> list[dict[str, str]]:
    """Make different worked problems; the same arguments give the same rows in every process.

    Args:
        num_rows: Number of rows.
        seed: Seed of the problems.
        split: "train" or "test"; a question is in the same split whatever the seed.
        kind: One of KINDS; None for a mixture of all TEMPLATES.

    Returns:
        Rows with `question`, `solution` (ending in `\\boxed{…}.`), `reasoning_trace` and `answer`.

    Raises:
        InputError: If there is no such split, or there are fewer different problems.
    """
    rng = Random(f"arithmetic {seed} {split}")  # seeded with text: the same in every process
    templates = TEMPLATES if kind is None else (KINDS[kind],)
    drawn = draw_different(
        "arithmetic", lambda: rng.choice(templates)(rng), lambda worked: worked[0], num_rows, split
    )
    return [
        {
            "question": question,
            "solution": f"{rng.choice(CONCLUSIONS)} \\boxed{{{answer}}}.",
            "reasoning_trace": trace,
            "answer": answer,
        }
        for question, trace, answer in drawn
    ]


CONCLUSIONS = ("The answer is", "So the result is", "This gives", "Therefore we get")


def addition(rng: Random) -> Worked:
    """Make a column addition of two numbers below 1000, with the carries written out."""
    a, b = rng.randint(104, 899), rng.randint(104, 899)
    lines, carry = [], 0
    for place, name in enumerate(("Ones", "Tens", "Hundreds")):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        sum_text = f"{x} + {y} + {carry} = {total}" if carry else f"{x} + {y} = {total}"
        carry = total // 10
        is_last = name == "Hundreds"
        lines.append(f"{name}: {sum_text}" + (f", carry {carry}." if carry and not is_last else "."))
    lines.append(f"So {a} + {b} = {a + b}.")
    return f"What is {a} + {b}?", " ".join(lines), str(a + b)


def small_sum(rng: Random) -> Worked:
    """Add a digit to a number below 1000: easy, for runs that should learn within minutes."""
    a, b = rng.randint(101, 989), rng.randint(2, 9)
    trace = f"{a % 10} + {b} = {a % 10 + b}, so {a} + {b} = {a + b}."
    return f"What is {a} + {b}?", trace, str(a + b)


def subtraction(rng: Random) -> Worked:
    """Make a subtraction in two steps: first the tens, then the ones."""
    a, b = sorted(rng.sample(range(112, 1000), 2), reverse=True)
    tens, ones = b // 10 * 10, b % 10
    trace = (
        f"Take {b} away in two steps. First the tens: {a} - {tens} = {a - tens}. Then the ones: "
        f"{a - tens} - {ones} = {a - b}. Check: {a - b} + {b} = {a}."
    )
    return f"Compute {a} - {b}.", trace, str(a - b)


def short_multiplication(rng: Random) -> Worked:
    """Multiply a two-digit number by a digit."""
    a, b = rng.randint(12, 99), rng.randint(3, 9)
    tens, ones = a // 10 * 10, a % 10
    trace = (
        f"Split {a} into {tens} and {ones}. {tens} * {b} = {tens * b} and {ones} * {b} = {ones * b}. "
        f"Together {tens * b} + {ones * b} = {a * b}."
    )
    return f"Calculate {a} * {b}.", trace, str(a * b)


def long_multiplication(rng: Random) -> Worked:
    """Multiply two two-digit numbers."""
    a, b = rng.randint(12, 99), rng.randint(12, 99)
    tens, ones = b // 10 * 10, b % 10
    trace = (
        f"Split {b} into {tens} and {ones}. {a} * {tens} = {a * tens}. {a} * {ones} = {a * ones}. "
        f"Adding both: {a * tens} + {a * ones} = {a * b}."
    )
    return f"What is the product of {a} and {b}?", trace, str(a * b)


def linear_equation(rng: Random) -> Worked:
    """Make an equation of the form a x + b = c."""
    a, b, x = rng.randint(2, 12), rng.randint(1, 40), rng.randint(2, 25)
    c = a * x + b
    trace = (
        f"Take {b} from both sides: {c} - {b} = {c - b}, so {a}x is {c - b}. Divide by {a}: "
        f"{c - b} / {a} = {x}. Check: {a} * {x} + {b} = {c}."
    )
    return f"Solve {a}x + {b} = {c} for x.", trace, str(x)


def two_sided_equation(rng: Random) -> Worked:
    """Make an equation with x on both sides."""
    x, small, step, b = rng.randint(2, 20), rng.randint(2, 7), rng.randint(2, 7), rng.randint(1, 30)
    large, d = small + step, b + step * x
    trace = (
        f"Bring x to one side: {large} - {small} = {step}, so {step}x + {b} is {d}. Take {b} away: "
        f"{d} - {b} = {d - b}. Divide: {d - b} / {step} = {x}."
    )
    return f"Find x if {large}x + {b} = {small}x + {d}.", trace, str(x)


def percentage(rng: Random) -> Worked:
    """Ask for a percentage of a number, computed from one percent."""
    percent, one = rng.choice((5, 15, 20, 25, 30, 35, 40, 60, 75, 80)), rng.randint(2, 40)
    whole = one * 100 if rng.random() < 0.5 else one * 20
    per_one = Fraction(whole, 100)
    part = per_one * percent
    trace = (
        f"One percent of {whole} is {whole} / 100 = {format_decimal(per_one)}. Then {percent} percent is "
        f"{format_decimal(per_one)} * {percent} = {format_decimal(part)}."
    )
    return f"What is {percent}% of {whole}?", trace, format_decimal(part)


def fraction_sum(rng: Random) -> Worked:
    """Add two fractions with different denominators."""
    b, d = rng.sample((2, 3, 4, 5, 6, 7, 8, 9), 2)
    a, c = rng.randint(1, b - 1), rng.randint(1, d - 1)
    total = Fraction(a, b) + Fraction(c, d)
    trace = (
        f"Use the denominator {b} * {d} = {b * d}. The numerators become {a} * {d} = {a * d} and "
        f"{c} * {b} = {c * b}. {a * d} + {c * b} = {a * d + c * b}, so the sum is {a * d + c * b}/{b * d}"
    )
    reduced = f"{total.numerator}/{total.denominator}" if total.denominator > 1 else str(total.numerator)
    trace += "." if reduced == f"{a * d + c * b}/{b * d}" else f", which reduces to {reduced}."
    return f"Add the fractions {a}/{b} and {c}/{d}. Reduce the result.", trace, reduced


def fraction_of_amount(rng: Random) -> Worked:
    """Ask what is left when a fraction of some things is given away."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    d = rng.choice((3, 4, 5, 6, 8))
    n, unit = rng.randint(1, d - 1), rng.randint(2, 15)
    whole = d * unit
    trace = (
        f"One part is {whole} / {d} = {unit}. {name} gives away {n} such parts: {unit} * {n} = {unit * n}. "
        f"What is left is {whole} - {unit * n} = {whole - unit * n}."
    )
    question = f"{name} has {whole} {thing} and gives {n}/{d} of them away. How many {thing} are left?"
    return question, trace, str(whole - unit * n)


def unit_price(rng: Random) -> Worked:
    """Ask for the price of some things, given the price of others."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    n, price, m = rng.randint(2, 9), rng.randint(2, 15), rng.randint(10, 25)
    trace = (
        f"First find the price of one. {n * price} / {n} = {price}, so one costs {price} dollars. "
        f"For {m} of them: {m} * {price} = {m * price} dollars."
    )
    question = f"{name} pays {n * price} dollars for {n} {thing}. How many dollars do {m} {thing} cost?"
    return question, trace, str(m * price)


def change(rng: Random) -> Worked:
    """Ask for the change after buying two kinds of things."""
    name, (thing, other) = rng.choice(NAMES), rng.sample(THINGS, 2)
    n, price, m, other_price = (rng.randint(2, 9) for _ in range(4))
    total = n * price + m * other_price
    paid = (total // 50 + 1) * 50
    trace = (
        f"The {thing} cost {n} * {price} = {n * price}. The {other} cost {m} * {other_price} = "
        f"{m * other_price}. Together {n * price} + {m * other_price} = {total}. "
        f"The change is {paid} - {total} = {paid - total}."
    )
    question = (
        f"{name} buys {n} {thing} at {price} dollars each and {m} {other} at {other_price} dollars each, and "
        f"pays with {paid} dollars. How many dollars come back?"
    )
    return question, trace, str(paid - total)


def travel(rng: Random) -> Worked:
    """Ask for the distance of a journey at the speed of another one."""
    vehicle, speed = rng.choice(VEHICLES), rng.randint(12, 90)
    hours, longer = rng.sample(range(2, 10), 2)
    trace = (
        f"The speed is distance over time: {speed * hours} / {hours} = {speed} km per hour. In {longer} "
        f"hours it covers {speed} * {longer} = {speed * longer} km."
    )
    question = (
        f"A {vehicle} covers {speed * hours} km in {hours} hours. At the same speed, how many km does it "
        f"cover in {longer} hours?"
    )
    return question, trace, str(speed * longer)


def ages(rng: Random) -> Worked:
    """Ask for an age, given a difference of ages and their sum some years later."""
    older, younger = rng.sample(NAMES, 2)
    young, gap, years = rng.randint(4, 30), rng.randint(2, 25), rng.randint(2, 10)
    total = 2 * young + gap + 2 * years
    trace = (
        f"Today their ages add up to {total} - 2 * {years} = {total - 2 * years}. Without the gap: "
        f"{total - 2 * years} - {gap} = {2 * young}. Half of it is {younger}'s age: "
        f"{2 * young} / 2 = {young}."
    )
    question = (
        f"{older} is {gap} years older than {younger}. In {years} years their ages add up to {total}. How "
        f"old is {younger} today?"
    )
    return question, trace, str(young)


def sharing(rng: Random) -> Worked:
    """Share some things in a ratio."""
    (first, second), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
    a, b = rng.sample(range(2, 8), 2)
    unit = rng.randint(3, 20)
    whole = (a + b) * unit
    trace = (
        f"There are {a} + {b} = {a + b} parts. One part is {whole} / {a + b} = {unit}. {first} gets {a} "
        f"parts: {a} * {unit} = {a * unit}. Check: {b} * {unit} = {b * unit} and "
        f"{a * unit} + {b * unit} = {whole}."
    )
    question = (
        f"{first} and {second} share {whole} {thing} in the ratio {a} to {b}. How many does {first} get?"
    )
    return question, trace, str(a * unit)


def average(rng: Random) -> Worked:
    """Ask for the mean of three numbers."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(5, 60), rng.randint(5, 60)
    c = rng.randint(5, 60)
    c += -(a + b + c) % 3
    total = a + b + c
    trace = (
        f"Add the three days: {a} + {b} = {a + b} and {a + b} + {c} = {total}. There are 3 days, so the mean "
        f"is {total} / 3 = {total // 3}."
    )
    question = (
        f"{name} sells {a}, {b} and {c} {thing} on three days. How many {thing} is that per day on average?"
    )
    return question, trace, str(total // 3)


def format_decimal(value: Fraction) -> str:
    """Write a number exactly that has few decimals."""
    return f"{float(value):.10f}".rstrip("0").rstrip(".")


TEMPLATES: tuple[Callable[[Random], Worked], ...] = (
    addition,
    subtraction,
    short_multiplication,
    long_multiplication,
    linear_equation,
    two_sided_equation,
    percentage,
    fraction_sum,
    fraction_of_amount,
    unit_price,
    change,
    travel,
    ages,
    sharing,
    average,
)

KINDS = {template.__name__: template for template in (*TEMPLATES, small_sum)}


def main() -> None:
    """Write small sums for configs/correctness_warmup.yaml and configs/correctness.yaml."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, number, seed, split in (
        ("warmup", 64, 1, "train"),
        ("train", 256, 0, "train"),
        ("test", 256, 0, "test"),
    ):
        rows = arithmetic_rows(number, seed, split, kind="small_sum")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
