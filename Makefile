# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
# Another interpreter: make test PYTHON=python3.12 (after make clean).

PYTHON ?= python3
VENV := .venv
WORKERS ?= 2
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
TORCH := $(shell sed -n 's|^torch==||p' constraints.txt)

# oneDNN's bfloat16 matmuls use AMX where the processor claims it, and die with SIGILL on machines (some
# virtual ones among them) that claim it without allowing it. AVX512_CORE_BF16 is the level below. It belongs
# to the set-up of runs, not to the library, which leaves a user's environment alone.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo quick quick-tests test lint types pytest browser test-versions test-threads test-accelerator test-compiled test-torch-lists fuzz docs format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## train a 48-block model and draw its memory (minutes; writes demo-output/)
	$(RUN) -m retrograde demo --output demo-output

quick: $(READY)  ## lint, types and some tests of every room, in less than two minutes on two cores
	@$(MAKE) --no-print-directory --jobs 2 lint types quick-tests

test: lint types pytest  ## everything CI checks: lint, types, tests, doctests, README

lint: $(READY)  ## ruff: rules and formatting
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY)  ## mypy, strict
	$(RUN) -m mypy

pytest: $(READY)  ## the tests alone, in two processes; ARGS="-k name" passes arguments on, WORKERS=0 takes one process
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS) || { \
	  echo "The tests that failed run once more, one by one: a race on a busy machine passes now, a fault fails again."; \
	  $(RUN) -m pytest --last-failed --last-failed-no-failures none $(ARGS); }

# Chromium and its driver, which the tests of the documents' memory calculator open. Debian has both; whoever is not root
# there, or has another system, installs them by hand or goes without: these tests are then skipped.
browser:  ## Chromium for the tests of the memory calculator, where apt-get can install it
	@command -v chromedriver > /dev/null || [ -n "$$CHROMEWEBDRIVER" ] || { command -v apt-get > /dev/null && [ "$$(id -u)" = 0 ] \
	  && echo "Installing chromium and chromium-driver for the tests of the memory calculator." \
	  && { timeout 120 apt-get update; DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install --yes --no-install-recommends chromium chromium-driver; } > /dev/null 2>&1; } \
	  || echo "No chromedriver here: the tests that open the memory calculator in a browser are skipped."

# One line or two per folder of tests/, chosen by their seconds: together about 95 s of one core, while mypy has the other.
QUICK := \
	adapters/test_dropins_routes.py adapters/test_dropins_signals.py adapters/test_dropins_states.py \
	cli/test_cli_profile.py \
	compiled/test_compiled_models.py \
	conversion/test_convert.py conversion/test_convert_returns.py \
	couplings \
	device/test_engine_on_a_device.py \
	diagnose/test_doctor_branches.py diagnose/test_doctor_refusals.py \
	distributed/test_fsdp_policies.py \
	engine/test_buffers.py engine/test_decisions.py engine/test_drift_control.py engine/test_exact_states.py engine/test_exceptions.py \
	engine/test_gradients.py engine/test_guard.py engine/test_histories.py engine/test_programs.py engine/test_replay.py \
	fuzzing \
	fused_optimizer/test_fused_optimizer_refusals.py fused_optimizer/test_fused_optimizer_rounds.py \
	measure \
	memory \
	models/test_chunked.py models/test_generation.py \
	network \
	nn \
	planning/test_planner.py \
	repository/test_layout.py \
	sequence \
	trainers/test_peft.py \
	training/test_configuration.py training/test_courses.py

quick-tests: $(READY)
	$(RUN) -m pytest -q $(QUICK:%=tests/%) $(ARGS)

# The oldest torch that pyproject.toml allows and the newest that was tried, each in an environment of its own.
# pip's wheels for Linux bring CUDA along, some gigabytes; an index of wheels for the CPU alone spares them. test_fit.py
# allows processes less memory than torch with CUDA takes to start.
TORCHES ?= $(shell sed -n 's|^dependencies = .*torch>=\([0-9.]*\).*|\1|p' pyproject.toml) 2.15.0
CORE := compiled couplings diagnose engine fused_optimizer measure memory network planning sequence \
	distributed/test_ddp.py distributed/test_fsdp_policies.py \
	conversion/test_bdia.py conversion/test_convert.py conversion/test_convert_returns.py conversion/test_gradient_checkpointing.py
ELSEWHERE := planning/test_fit.py fused_optimizer/test_fused_optimizer_processes.py

test-versions: $(TORCHES:%=.venv-torch-%/.ready)  ## the core tests with the oldest and the newest torch; TORCHES="2.12.1" others
	@for version in $(TORCHES); do echo "torch $$version"; \
	  .venv-torch-$$version/bin/python -m pytest $(CORE:%=tests/%) $(ELSEWHERE:%=--ignore=tests/%) $(ARGS) || exit 1; done

test-threads: $(READY)  ## all tests with every backward pass in a fresh thread, as on an accelerator
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile --backward-threads $(ARGS)

test-accelerator: $(READY)  ## the tests that need an accelerator, on this machine's; writes accelerator-report.md
	$(RUN) tests/device/accelerator_report.py $(ARGS)

test-compiled: $(READY)  ## every row of docs/compile.md with generated code (some minutes)
	$(RUN) -m pytest tests/compiled $(ARGS)

test-torch-lists: $(READY)  ## all of torch's own operators and modules as branches, against plain autograd (a quarter of an hour)
	TORCH_LISTS=all $(RUN) -m pytest tests/engine/test_torch_lists.py $(ARGS)

FUZZ ?= 40

fuzz: $(READY)  ## odd commands, configurations and checkpoints, drawn at random; FUZZ=200 for more (minutes)
	RETROGRADE_FUZZ=$(FUZZ) $(RUN) -m pytest -q tests/fuzzing $(ARGS)

docs: $(READY)  ## the documents as a site in site/ (the tests build it too)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

format: $(READY)  ## let ruff rewrite the code in place
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(READY)  ## retrograde beside its peers, eager and compiled: time, memory, gradients (half an hour; writes benchmarks/results/)
	@$(RUN) -m pip install --quiet --no-deps --requirement requirements-bench.txt || { \
	  echo "Not all peers could be installed; the report will name those that are missing."; \
	  sed 's/#.*//' requirements-bench.txt | xargs -n 1 $(RUN) -m pip install --quiet --no-deps || true; }
	$(RUN) benchmarks/run.py $(ARGS)
	$(RUN) benchmarks/compiled.py

clean:  ## remove the environment, caches and what the demo wrote
	rm -rf $(VENV) .venv-torch-* demo-output accelerator-report.md memory-profile example-output build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The file is written last, so an interrupted set-up starts again and a finished one is used as it is.
# A Python without ensurepip (Debian's, without python3-venv) cannot put pip into .venv: its own pip can.
# --no-build-isolation: a build environment apart would not follow the constraints.
$(READY): pyproject.toml constraints.txt requirements-interop.txt requirements-hub.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"retrograde needs Python 3.10 or later; $(PYTHON) is {v}. Try make PYTHON=python3.11.")'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(RUN) install pip; }
	$(RUN) -m pip install --quiet --constraint constraints.txt torch==$(TORCH)
	$(RUN) -m pip install --quiet --constraint constraints.txt hatchling hatch-fancy-pypi-readme editables
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	$(RUN) -m pip install --quiet --no-deps --requirement requirements-interop.txt
	$(RUN) -m pip install --quiet --no-deps --requirement requirements-hub.txt
	$(RUN) -c 'import torch; v = torch.__version__; assert v.split("+")[0] == "$(TORCH)", f"torch is {v}, not $(TORCH)"'
	@touch $@

# Kept out of git, and so of ruff, by a file of its own.
.venv-torch-%/.ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(@D) || { $(PYTHON) -m venv --without-pip $(@D) && $(PYTHON) -m pip --python $(@D)/bin/python install pip; }
	@echo '*' > $(@D)/.gitignore
	sed /^torch==/d constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet torch==$*
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt editables expecttest hatchling hatch-fancy-pypi-readme hypothesis matplotlib numpy pytest pytest-timeout rich typer
	$(@D)/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	$(@D)/bin/python -c 'import torch; v = torch.__version__; assert v.split("+")[0] == "$*", f"torch is {v}, not $*"'
	@touch $@
