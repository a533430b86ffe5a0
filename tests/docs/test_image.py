"""The image's build context: .dockerignore lets through what the Dockerfile installs from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from commands import ROOT
from wheel import build_wheel


def test_the_image_has_what_its_installation_reads(tmp_path: Path) -> None:
    """.dockerignore lets files through by name: with one too few, the image cannot be built."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, tmp_path / name)
    wheel = build_wheel(tmp_path, tmp_path)
    assert wheel.stat().st_size > 1e6
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^USER (\w+)", dockerfile, re.MULTILINE) == ["rlt"]  # and no way back to root
    assert (tmp_path / "Makefile").is_file()
