"""What rows cost when a run starts: seconds of the first and of later starts, and memory per token.

.venv/bin/python benchmarks/data.py [--rows 20000] [--tokens 3000] [--model smollm2-135m]

Every start is a separate process, which sets up the datamodule and then serves one epoch, so that every token
is read. Memory is counted from before the set-up. The first start tokenises and writes the cache; a later one
maps the cache into memory. "as lists" is a later start that keeps all items as Python lists.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from side_by_side import ROOT, alternate, bars, benchmark_parser, finish, read_options

from rlt_lightning.models.embedded import DEFAULT_MODEL
from rlt_lightning.models.load import load_tokenizer

GOAL, MAX_BYTES = 5.0, 8.0  # how much faster a later start must be; bytes a token
START = """
import json, os, sys, time
from rlt_lightning.datamodules import StudentSFTData
from rlt_lightning.modules.phases import resident_bytes
source, os.environ["RLT_CACHE_DIR"], model, longest, lists = json.loads(sys.argv[1])
before, start = resident_bytes(), time.perf_counter()
data = StudentSFTData(source, tokenizer=model, max_length=longest)
data.setup("fit")
seconds = time.perf_counter() - start
after_setup = resident_bytes()
kept = list(data.items) if lists else []
tokens = 0
for batch in data.train_dataloader():
    tokens += sum(len(example.token_ids) for example in batch.examples)
total = int(data.items.sum_columns("token_ids").sum())
found = {"seconds": seconds, "tokens": total, "served": tokens, "setup_bytes": after_setup - before}
print(json.dumps(found | {"resident_bytes": resident_bytes() - before}))
"""


def write_rows(path: Path, num_rows: int, num_tokens: int, tokenizer: Any) -> None:
    """Write different rows of about so many tokens each."""
    rng = random.Random(0)

    def sentence() -> str:
        return f"Then we add {rng.randrange(1000)} to {rng.randrange(1000)}, which is easy enough to check. "

    length = len(tokenizer("".join(sentence() for _ in range(100)))["input_ids"]) / 100
    with path.open("w") as file:
        for number in range(num_rows):
            trace = "".join(sentence() for _ in range(round(num_tokens / length)))
            row = {"question": f"{number} + 1?", "solution": str(number + 1), "reasoning_trace": trace}
            file.write(json.dumps(row) + "\n")


def side(first: bool, lists: bool, *arguments: Any) -> Any:
    def run() -> dict[str, float]:
        if first:
            shutil.rmtree(arguments[1], ignore_errors=True)
        command = [sys.executable, "-c", START, json.dumps([*arguments, lists])]
        found = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
        return json.loads(found.splitlines()[-1])

    return run


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--tokens", type=int, default=3000, help="of a row")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer is used")
    options = read_options(parser, rows=60, tokens=3000, model="miniature")
    with TemporaryDirectory() as folder:
        source, cache = Path(folder, "rows.jsonl"), Path(folder, "tokens")
        write_rows(source, options.rows, options.tokens, load_tokenizer(options.model))
        arguments = (str(source), str(cache), options.model, 4 * options.tokens)
        sides = {
            "first start": side(True, False, *arguments),
            "later start": side(False, False, *arguments),
            "as lists": side(False, True, *arguments),
        }
        results = alternate(sides, options.rounds, warm_up=0)
        results["file"] = {"bytes": sum(path.stat().st_size for path in cache.rglob("*.arrow"))}
    tokens = results["later start"]["tokens"]
    memory = {name: results[name]["resident_bytes"] / tokens for name in sides}
    seconds = {name: results[name]["seconds"] for name in ("first start", "later start")}
    finish(
        options.output,
        results | {"bytes_per_token": memory},
        lambda: bars(options.output, "start of a run", {"seconds": seconds, "bytes per token": memory}),
        ratio=seconds["first start"] / seconds["later start"],
        goal=GOAL,
        bytes_per_token=max(memory["first start"], memory["later start"]),
        limit=MAX_BYTES,
    )


if __name__ == "__main__":
    main()
