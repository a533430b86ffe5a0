"""The make targets, programs and files that contributors' and GitHub's instructions name exist."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from commands import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
COMMANDS = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_workflow_is_a_target(command: str) -> None:
    subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_the_workflow_tests_the_oldest_python() -> None:
    versions = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert versions[0] == oldest[1]


def test_pre_commit_runs_what_make_check_runs() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    [local] = [repository for repository in repositories if repository["repo"] == "local"]
    hooks = {hook["entry"].replace(" --force-exclude", "") for hook in local["hooks"]}
    recipe = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    assert hooks == {f".venv/bin/{words.removesuffix(' .')}" for words in re.findall(r"/(.+)$", recipe, re.M)}


def test_the_path_of_a_batch_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "extend.md").read_text().split("## The path of a batch")[1].split("\n## ")[0]
    names = re.findall(r"`(\w+/(?:\w+\.py)?|\w+\.py)`", page.replace("`rlt_lightning/`", ""))
    assert len(names) > 30
    missing = [name for name in names if not (ROOT / "rlt_lightning" / name).exists()]
    assert not missing, "docs/extend.md names what is not there"
