"""scripts/setup_vllm_gpu.sh checks the driver, and its dry run prints the commands; the image's files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import ROOT
from wheel import build_wheel


def dry_run(folder: Path, driver: str | None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a stand-in for nvidia-smi, and change nothing."""
    (folder / "bin").mkdir(parents=True)
    for name in ("bash", "dirname", "python3"):
        (folder / "bin" / name).symlink_to(
            next(p for d in os.get_exec_path() if (p := Path(d) / name).exists())
        )
    if driver is not None:
        (folder / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\necho '{driver}'\necho '{driver}'\n")
        (folder / "bin" / "nvidia-smi").chmod(0o755)
    variables = {"PATH": str(folder / "bin"), "DRY_RUN": "1", "VENV": str(folder / "vllm")} | environment
    command = ["bash", str(ROOT / "scripts" / "setup_vllm_gpu.sh")]
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


def test_a_new_driver_gets_the_wheel_of_pypi(tmp_path: Path) -> None:
    result = dry_run(tmp_path, "580.95.05")
    assert result.returncode == 0, result.stderr
    venv = tmp_path / "vllm"
    assert result.stdout.splitlines()[:3] == [
        f"python3 -m venv --clear {venv}",
        f"{venv}/bin/python -m pip install --quiet --no-compile vllm==0.32.0",
        f"{venv}/bin/python -m pip install --quiet --no-deps .",
    ]
    assert not venv.exists()


def test_an_older_driver_gets_builds_that_are_named(tmp_path: Path) -> None:
    index = "https://download.pytorch.org/whl/cu129"
    result = dry_run(tmp_path, "550.54.15", INDEX=index, VLLM="vllm.whl")
    assert f"--extra-index-url {index} vllm.whl\n" in result.stdout


@pytest.mark.parametrize(
    ("driver", "index", "fault"),
    [
        (None, "", "nvidia-smi must be on PATH"),
        ("570.86.10", "", "the driver must be 580 or newer, but is 570.86.10"),
        ("570.86.10", "https://an.index", "set both VLLM and INDEX"),  # PyPI's vLLM would come all the same
        ("515.65.01", "https://an.index vllm.whl", "need driver 525 or newer, but it is 515.65.01"),
        ("NVIDIA-SMI has failed", "", "must report a driver version"),
    ],
)
def test_a_driver_that_will_not_do_is_refused(
    driver: str | None, index: str, fault: str, tmp_path: Path
) -> None:
    given = dict(zip(("INDEX", "VLLM"), index.split(), strict=False))
    result = dry_run(tmp_path, driver, **given)
    assert result.returncode == 2
    assert fault in result.stderr
    assert result.stdout == ""


def test_a_driver_can_be_named_where_there_is_none_to_ask(tmp_path: Path) -> None:
    result = dry_run(tmp_path, None, DRIVER="580")
    assert result.returncode == 0, result.stderr
    assert "get_device_name" not in result.stdout
    result = dry_run(tmp_path / "older", None, DRIVER="570")
    assert (result.returncode, result.stdout) == (2, "")
    assert "the driver must be 580 or newer, but is 570" in result.stderr


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
    for script in ("setup_vllm_gpu.sh", "setup_vllm_cpu.sh"):
        assert os.access(tmp_path / "scripts" / script, os.X_OK)
