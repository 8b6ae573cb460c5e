# `make demo` and `make test` do all the set-up they need, from a fresh clone with Python 3.11, pip and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := kaminari_core kaminari_http kaminari_qwen3vl kaminari_glmocr
MANIFESTS := constraints.txt $(PACKAGES:%=%/pyproject.toml)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test test-slow lint format docs wheels gpu-check clean

help:
	@sed -n 's/^## //p' Makefile

# The stamps are files inside the environment: removing the environment removes them, and a second call installs nothing.
$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/pyvenv.cfg $(MANIFESTS)
	$(PIP) $(PACKAGES:%=-e ./%)
	touch $@

$(VENV)/installed-dev: $(VENV)/pyvenv.cfg $(MANIFESTS) requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	touch $(VENV)/installed $@

## make demo       read the sample receipt with the bundled checkpoint
demo: $(VENV)/installed
	$(BIN)/kaminari run --model qwen3vl --checkpoint tiny --image assets/receipt.png --task ocr

## make test       run the test suite
test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not slow"

## make test-slow  run the tests that take minutes or install into fresh environments
test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

## make lint       check style, formatting and types
lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES) scripts

## make format     fix what can be fixed by itself
format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## make docs       write the generated parts of the documents
docs: $(VENV)/installed-dev
	$(BIN)/python scripts/make_cli_docs.py
	$(BIN)/python scripts/make_performance_docs.py
	$(BIN)/python scripts/make_evaluation_docs.py

## make wheels     build the wheel of each package into dist/
wheels: $(VENV)/installed-dev
	for package in $(PACKAGES); do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$package || exit 1; done

## make gpu-check  check the engine on a CUDA card
gpu-check: $(VENV)/installed-dev
	$(BIN)/python benchmarks/gpu_check.py

## make clean      remove what was built; the environment stays
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
