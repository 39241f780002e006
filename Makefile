# Every target needs only make and a Python >= 3.11; everything else is installed into .venv first.

VENV ?= .venv
PY := $(VENV)/bin/python
LOCK := requirements.txt
PYTEST_ARGS ?= -n 2 --dist loadgroup
SOURCES := src tests bench scripts examples

# Keyed on content rather than on times, so that a checkout or a restored cache never installs without need.
STAMP := $(VENV)/.installed-$(shell cat $(LOCK) pyproject.toml | cksum | tr ' ' '-')

.DEFAULT_GOAL := help
.PHONY: bench help install demo test test-fast test-long check format graph simulate soak attack sbom lock dev clean \
	bench-control bench-ingest bench-tip bench-compact bench-query bench-sink bench-alerts bench-delivery bench-pressure soak-pressure

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '\n  PYTHON=...       the interpreter that makes $(VENV) (otherwise the first >= 3.11 that is found)\n'
	@printf '  PYTEST_ARGS=...  the arguments of pytest (now: $(PYTEST_ARGS))\n'

install: $(STAMP) ## Make .venv and install exactly the locked versions

demo: $(STAMP) ## Show it at work: a chain becomes tables, alerts and answers, through two kills and a reorg
	$(PY) -m examples.demo

test: $(STAMP) ## Run the tests (PYTEST_ARGS="-k claim -x" runs some of them)
	$(PY) -m pytest -m "not long" $(PYTEST_ARGS)

# The generated calls of test_openapi.py cost as much as all other tests of these folders together.
test-fast: $(STAMP) ## Run the tests for the loop at the keyboard: unit, contract and repository; about a minute
	$(PY) -m pytest -m "not long" $(PYTEST_ARGS) tests/unit tests/contract tests/repo examples/operators \
		--ignore tests/contract/test_openapi.py

test-long: $(STAMP) ## Run what repeats other tests for longer: a soak of five minutes, many more generated requests
	$(PY) -m pytest -m long $(PYTEST_ARGS)
	TRACELAKE_OPENAPI_EXAMPLES=100 $(PY) -m pytest $(PYTEST_ARGS) tests/contract/test_openapi.py

check: $(STAMP) ## Lint, formatting, strict types, import boundaries
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m mypy --strict
	$(VENV)/bin/lint-imports --no-logo

format: $(STAMP) ## Rewrite the code in the house format
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

graph: $(STAMP) ## Draw the packages' imports and the tree's figures into docs/architecture.md
	$(PY) -m scripts.structure --write

simulate: $(STAMP) ## Run SEEDS seeds of the simulation (docs/simulation.md)
	$(PY) -m tests.support.simulation --seeds $(or $(SEEDS),100) \
		$(if $(FIRST),--first $(FIRST)) $(if $(PROCESSES),--processes $(PROCESSES))

soak: $(STAMP) ## Follow a real node through reorgs and crashes for SECONDS (300), then compare every table
	$(PY) -m tests.support.chain_soak --seconds $(or $(SECONDS),300) --seed $(or $(SEED),1)

attack: $(STAMP) ## Attack a running stack as operators, functions, SQL, DAGs and neighbours (ATTACK_ARGS="--only sql")
	$(PY) -m tests.support.attack $(ATTACK_ARGS)

sbom: $(STAMP) ## Write the bill of materials, CycloneDX, to dist/tracelake.cdx.json
	$(PY) -m scripts.bill_of_materials dist/tracelake.cdx.json

soak-pressure: $(STAMP) ## Overload a stack for SECONDS (300) while its processes die: queues keep their bounds, nothing is lost
	SECONDS=$(or $(SECONDS),300) $(PY) -m pytest -q -m long tests/faults/test_pressure_soak.py tests/faults/test_overload_soak.py

bench: bench-control bench-ingest bench-tip bench-compact bench-query bench-sink bench-alerts bench-delivery bench-pressure ## Run every benchmark

bench-control: $(STAMP) ## Measure the control plane, one JSON line per workload (bench/README.md)
	$(PY) -m bench.control

bench-ingest: $(STAMP) ## Blocks, transactions and logs of one chain to files: ours beside cryo and ethereum-etl
	$(PY) -m bench.ingest

bench-tip: $(STAMP) ## From mined to visible in hot Postgres, two blocks a second for two minutes
	$(PY) -m bench.tip

bench-compact: $(STAMP) ## Hot rows to Parquet, beside plain COPY
	$(PY) -m bench.compact

bench-query: $(STAMP) ## What the Query Service adds to a query over 10 M logs, beside plain DuckDB
	$(PY) -m bench.query

bench-sink: $(STAMP) ## Records from publish to committed, beside plain COPY; then a backlog of small batches
	$(PY) -m bench.sink
	$(PY) -m bench.sink --backlog 100000

bench-pressure: $(STAMP) ## How soon backpressure holds and releases, what it costs, and a graph of 1,000 jobs
	$(PY) -m bench.pressure

bench-delivery: $(STAMP) ## From a committed row to its receiver: how soon, and how many a second
	$(PY) -m bench.delivery

bench-alerts: $(STAMP) ## From a mined transfer to its alert, and from a reorg to its retraction
	$(PY) -m bench.alerts

dev: $(STAMP) ## Run the whole stack in the foreground, its data in .tracelake
	$(VENV)/bin/tracelake dev --home .tracelake

# Resolved by the oldest Python that is supported: what it picks installs on the newer ones as well.
lock: $(STAMP) ## Compile requirements.txt anew from pyproject.toml (UPGRADE=1 takes newer versions)
	@$(PY) -c 'import sys; sys.exit("make lock: resolve with Python 3.11 (make clean install lock PYTHON=python3.11)" if sys.version_info[:2] != (3, 11) else 0)'
	CUSTOM_COMPILE_COMMAND="make lock" $(PY) -m piptools compile --quiet --no-config \
		--extra dev --build-deps-for editable --no-build-isolation --allow-unsafe \
		--generate-hashes --strip-extras --no-emit-options --no-emit-find-links \
		--no-emit-index-url --no-emit-trusted-host $(if $(UPGRADE),--upgrade) \
		--output-file $(LOCK) pyproject.toml

clean: ## Remove .venv and the tools' caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# Build dependencies come hashed from the lock too, hence no build isolation.
$(STAMP): | $(VENV)/bin/python
	$(PY) -m pip install --quiet --require-hashes -r $(LOCK)
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@scripts/install-system-packages
	@VENV=$(VENV) scripts/install-anvil
	@$(PY) -m tracelake.worker.spark.class_archive || true
	@rm -f $(VENV)/.installed-*
	@touch $@

$(VENV)/bin/python:
	@for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3.14 python3; do \
		if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$("$$candidate" --version)"; \
			exec "$$candidate" -m venv $(VENV); \
		fi; \
	done; \
	echo "No Python >= 3.11 with the venv module was found. Install one, or name it: make install PYTHON=/path/to/python3" >&2; \
	exit 1
