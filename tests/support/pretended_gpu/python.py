"""Do what `python WORDS` does, on pretended GPUs: `python -m pretended_gpu.python WORDS`."""

from __future__ import annotations

import sys

from commands import run_python

import pretended_gpu.run as pretended  # before torch

if __name__ == "__main__":
    pretended.prepare()
    run_python(sys.argv[1:])
