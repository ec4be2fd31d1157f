.DEFAULT_GOAL := help
PYTHON ?= .venv/bin/python

.PHONY: help setup format lint types unit integration check engines corpus

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: .venv/installed  ## Make .venv with everything that development needs

.venv/installed: pyproject.toml
	python3 -m venv .venv
	.venv/bin/pip install -q -e '.[engine,data,html,live,metrics,perfetto,dev]'
	touch $@

format: setup  ## Format the code
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint: setup  ## Formatting and lint
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types: setup  ## mypy, strict
	$(PYTHON) -m mypy

unit: setup  ## Unit tests
	$(PYTHON) -m pytest tests/unit

integration: setup  ## Tests with the real model and real servers
	$(PYTHON) -m pytest tests/integration

check: lint types  ## Everything that must pass before a commit lands
	scripts/suite $(PYTHON)

engines: setup  ## The tests that start vLLM more often than CI does (SPECMETER_VLLM_PYTHON names its Python)
	SPECMETER_VLLM_MORE=1 $(PYTHON) -m pytest -m vllm tests/integration

corpus: setup  ## Resolve every point in every release of SGLang and vLLM (downloads the wheels once)
	$(PYTHON) benchmarks/corpus.py --write
