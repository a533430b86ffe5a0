"""Write docs/models.md: `python scripts/models_page.py`.

It builds the small random models of tests/support/families.py and checks them as a run does at its start.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlt_lightning.engines.slots import choose_decoder
from rlt_lightning.models.load import load_model
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.models.packed import disable_dropout, verify_layout
from rlt_lightning.strategies.sharding import ModelEntry
from rlt_lightning.types import InputError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from families import FAMILIES, build  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
# How a model is scored and sampled, as the page says it.
SCORING = {"auto": "fast", "single": "slow"}
SAMPLING = {
    "slots": "fast",
    "padded": "slower",
    "unpadded": "slower, prompts of one length",
    "uncached": "slowest",
}
HEADER = """# Models

```sh
rlt fit --config laptop/rlt --trainer.max_steps 1    # every run begins with the checks below
```

Read this page to see whether a model family runs, and how fast. A small random model of each went through the
checks that a run makes at its start (`scripts/models_page.py`), the default LoRA included. A model that is
not here is checked likewise, and refused if its log-probs are wrong.

* **[Scoring](memory.md#layouts)** and training: *fast* computes a group's prompt once, many sequences
  in a row; *slow* runs one sequence per forward.
* **[Sampling](rollouts.md)** by `HFEngine`: *fast* has our cache, *slower* that of
  transformers, *slowest* none.

| family | scoring | sampling | remark |
|---|---|---|---|
"""


def write_page() -> str:
    """Return the page."""
    rows, refusals = [], []
    for name in FAMILIES:
        row, refused = describe(name)
        rows.append(row)
        refusals += refused
    return HEADER + "\n".join(rows) + "\n\n## Refused\n\n" + "\n".join(refusals) + "\n"


def describe(name: str) -> tuple[str, list[str]]:
    """Return a family's row, and a line for everything that it is refused."""
    refused: list[str] = []

    def attempt(what: str, check: Callable[[], str]) -> str:
        try:
            return check()
        except InputError as error:
            cause = str(error).split(". ")[0]
            refused.append(f"* {title}, {what}: {cause}.")
            return "refused"

    kind, _, variant = name.partition(", ")
    title = f"`{kind}`" + (f", {variant}" if variant else "")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(name, Path(folder))
        model = load_model(folder)
        disable_dropout(model)
        sampling = attempt("sampling", lambda: SAMPLING[choose_decoder(model.eval(), model.__call__)])
        layout = attempt("training", lambda: SCORING[verify_layout(ModelEntry(model.train()), kind, "auto")])
        attempt("LoRA", lambda: adapt(model))
    return f"| {title} | {layout} | {sampling} | {FAMILIES[name].note} |", refused


def adapt(model: Any) -> str:
    """Add the default adapter, and run the adapted model."""
    add_adapter(model, LoRA(), seed=0)
    model(input_ids=torch.arange(10, 30)[None], use_cache=False)
    return "yes"


if __name__ == "__main__":
    PAGE.write_text(write_page())
