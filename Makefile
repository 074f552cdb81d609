# Everything a person or CI runs. The environment is made once, from the pinned lock.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-lock

# Python keeps what it compiled: without that, each of some hundred processes compiles all modules and tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slurm test-clusters wheel newest gpu gpu-dry check soak pictures site format lock clean

demo: $(STAMP)
	$(BIN)/python -m launch auto --task causal-lm --again

# Two files at a time, the long ones first: most tests wait for one process to start.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# On two Slurms of two nodes each on this machine: root, and Debian's packages slurm-wlm and munge. A test
# waits more than it computes.
test-slurm: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist load -m "slurm and not slow" tests/slurm

# Ray's workers and the pods of a Kubernetes job, for real on this machine.
test-clusters: $(STAMP)
	$(BIN)/python -m pytest -m "cluster and not slow" tests/integration

# The wheel in clean environments. PYTHONS="3.12 3.13" for other Pythons, EXTRAS=1 for each extra as well.
wheel: $(STAMP)
	PYTHON=$(abspath $(BIN)/python) tests/wheel.sh

# Do the newest torch and transformers keep the curve? They redo steps of a run of the pinned ones, and the stored copy.
newest: $(STAMP)
	$(PYTHON) -m venv build/newest
	build/newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]'
	$(BIN)/python -m launch auto --task causal-lm --steps 60 --out build/newest/runs --name before --again --quiet
	build/newest/bin/python -m launch verify build/newest/runs/before
	build/newest/bin/python -m pytest tests/integration/test_golden.py tests/unit

# On a GPU, with what is there: installs nothing. QUICK=1 tries it on any machine, PART=3 runs one part,
# AGAIN=1 measures anew what is there already, OUT=folder is where results go, END=570 ends it after so many seconds.
gpu:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks gpu $(if $(QUICK),--quick) $(if $(PART),--part $(PART)) \
	    $(if $(AGAIN),--again) $(if $(OUT),--out $(OUT)) $(if $(END),--seconds $(END))

# Kernels and least time of a step on an H100 that is not there: needs torch built for CUDA, and no GPU.
gpu-dry:
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu.roofline gpt2 32 1024
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu.roofline gpt2 32 1024 on
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu.roofline gpt2 32 1024 max-autotune
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu.roofline lora-8b 2 2048

soak: $(STAMP)
	$(BIN)/python -m pytest -m slow
	EXTRAS=1 PYTHON=$(abspath $(BIN)/python) tests/wheel.sh
	$(BIN)/python -m benchmarks soak

# The README's pictures, from real runs: some minutes, and Chromium.
pictures: $(STAMP)
	$(BIN)/python docs/pictures/claim.py
	$(BIN)/python docs/pictures/make.py

# The documentation as a site in build/site, with every link checked, and a page for each task from `describe`.
site: $(STAMP)
	$(PYTHON) -m venv build/site-tools
	build/site-tools/bin/pip install --quiet mkdocs==1.6.1
	PROJECT_PYTHON=$(abspath $(BIN)/python) build/site-tools/bin/mkdocs build --strict --site-dir build/site

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .types && ln -sfn .. .types/isobatch  # mypy does not follow an editable installation
	MYPYPATH=.types $(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Versions are pinned by requirements.lock; what a platform needs of them (CUDA wheels, say) torch itself pins.
$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25" -c requirements.lock
	$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[dev]'
	touch $(STAMP)

# Re-pins what this environment has.
lock: $(STAMP)
	$(BIN)/python -m pip freeze --exclude-editable | sed '/^nvidia-ml-py/!{/^nvidia-/d}; /^triton/d; s/ @ .*torch-\([0-9.]*\).*/==\1/; s/+cpu$$//' > requirements.lock

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
