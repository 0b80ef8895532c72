# Works in a fresh clone: all targets first install what they need into .venv.

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Huge pages for large arrays make CPU steps faster (docs/scale.md). glibc reads this only when a process starts.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: demo test test-all test-fast lint docs bench clean

# Reinstalled when setup.py changes. The demo needs only this.
.venv/installed: setup.py
	@$(PYTHON) -c 'import sys; sys.exit("t5x_lab needs Python 3.11 or newer; this is %s. Use: make PYTHON=python3.11" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

.venv/tested: .venv/installed
	$(BIN)/python -m pip install --quiet -e '.[test,compare,lint]'
	@touch $@

demo: .venv/installed
	$(BIN)/t5x_lab demo

# A crashed worker ends the tests; pytest-xdist would otherwise wait for it forever.
# Files run in their own order: ordered by their number of tests, the longest single tests would be left for the end.
PYTEST := $(BIN)/python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

test: .venv/tested
	$(PYTEST) -m 'not exhaustive'

test-all: .venv/tested
	$(PYTEST)

test-fast: .venv/tested
	$(PYTEST) -m 'not slow and not exhaustive'

lint: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Warnings are errors. SITE_WITHOUT_OUTPUTS=1 builds the site without running notebooks.
docs: .venv/installed
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html: the site. To look at it, with its search: $(BIN)/python -m http.server --directory site"

bench: .venv/installed
	$(BIN)/python benchmarks/kill_and_resume.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
