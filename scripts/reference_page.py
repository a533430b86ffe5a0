"""Write the tables of docs/reference.md: `python scripts/reference_page.py`.

A table stands between two comments, and the text around it is written by hand. The tables of commands come
from the help texts, those of configs from their first lines, those of classes from the package's exports:

    <!-- generated: configs laptop -->
    | config | verb | what it is for | needs |
    <!-- end -->
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from metrics_page import write_markdown

from rlt_lightning.cli.help import VERBS
from rlt_lightning.run.shipped import list_shipped_configs, read_launch_line

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
MARKED = re.compile(r"(<!-- generated: (\w+) ?(\w*) -->\n).*?(<!-- end -->)", re.DOTALL)
# Lines of a config's head that say something other than what it needs.
OTHER_LINES = ("# Run: ", "# Next: ", "# Peak ", "# A 32B ")
# Settings that take a class: the module that exports the classes, and their base.
SETTINGS = {
    "model": ("modules", "lightning.pytorch.LightningModule"),
    "data": ("datamodules", "lightning.pytorch.LightningDataModule"),
    "model.reward": ("rewards", "rlt_lightning.rewards.Reward"),
    "model.advantages": ("numerics", "rlt_lightning.numerics.AdvantageEstimator"),
    "model.policy_loss": ("numerics", "rlt_lightning.numerics.PolicyLoss"),
    "rollouts.engine": ("engines", "rlt_lightning.engines.Engine"),
    "rollouts.engine.init_args.push": ("engines", "rlt_lightning.engines.WeightPush"),
    "trainer.strategy": ("strategies", "lightning.pytorch.strategies.Strategy"),
    "trainer.callbacks": ("callbacks", "lightning.pytorch.Callback"),
}


def write_page(text: str) -> str:
    """Return a page with every marked table as the code gives it."""
    writers: dict[str, Callable[[str], str]] = {
        "verbs": lambda _: write_verbs(),
        "options": write_options,
        "configs": write_configs,
        "classes": lambda _: write_classes(),
    }
    return MARKED.sub(lambda mark: f"{mark[1]}\n{writers[mark[2]](mark[3])}\n{mark[4]}", text)


def write_verbs() -> str:
    """Return the table of all commands."""
    rows = ((f"[`rlt {verb}`](#rlt-{verb})", text.partition("\n")[0]) for verb, text in VERBS.items())
    return write_markdown(("command", "what it does"), rows)


def write_options(_: str) -> str:
    """Return, for every command, what `rlt VERB --help` says."""
    return "\n".join(f"### rlt {verb}\n\n```text\n{text}```\n" for verb, text in VERBS.items())


def write_configs(folder: str) -> str:
    """Return the table of a folder of configs."""
    rows = [
        (f"`{name}`", f"`{read_launch_line(path.read_text())[1]}`", *describe(path.read_text()))
        for name, path in list_shipped_configs().items()
        if name.startswith(f"{folder}/")
    ]
    return write_markdown(("config", "verb", "what it is for", "needs"), rows)


def describe(config: str) -> tuple[str, str]:
    """Return what a config is for and what it needs, a sentence each, from its first lines."""
    head = [*takewhile(lambda line: line.startswith("#"), config.splitlines())]
    first = head[0].removeprefix("# ").removesuffix(".")
    starts = [number for number, line in enumerate(head) if line.startswith("# Needs: ")]
    if not starts:
        return link_pages(first), ""
    lines = takewhile(lambda line: not line.startswith(OTHER_LINES), head[starts[0] :])
    needs = " ".join(line.removeprefix("# ") for line in lines).removeprefix("Needs: ")
    return link_pages(first), link_pages(re.split(r"\.(?: |$)", needs)[0])


def link_pages(text: str) -> str:
    """Return a text in which the names of pages are links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)


def write_classes() -> str:
    """Return the table of the classes that settings take."""
    rows = []
    for setting, (folder, base) in SETTINGS.items():
        package = importlib.import_module(f"rlt_lightning.{folder}")
        module, _, name = base.rpartition(".")
        parent = getattr(importlib.import_module(module), name)
        exported = [getattr(package, name) for name in package.__all__]
        for kind in (value for value in exported if inspect.isclass(value) and not inspect.isabstract(value)):
            if parent in inspect.getmro(kind)[1:]:  # not issubclass: Engine is a protocol with attributes
                line = (inspect.getdoc(kind) or "").splitlines()[0].removesuffix(".")
                rows.append((f"`{setting}`", f"[`{kind.__name__}`](api/{folder}.md)", link_pages(line)))
    return write_markdown(("setting", "class", "what it does"), rows)


if __name__ == "__main__":
    PAGE.write_text(write_page(PAGE.read_text()))
