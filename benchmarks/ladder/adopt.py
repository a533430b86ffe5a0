"""Take the figures of a benchmark's JSON over into the ladder's results: NAME FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common import note


def main() -> None:
    name, file = sys.argv[1:]
    written = json.loads(Path(file).read_text())
    others = {key: value for key, value in written.items() if key not in ("figures", "provenance")}
    note(f"figures of {name}", **written["figures"], results=others)


if __name__ == "__main__":
    main()
