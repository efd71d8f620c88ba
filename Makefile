# make train: the main job. make test: the tests. Each sets up its own .venv first (Python 3.10+).
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS = 1
# glibc keeps freed memory. Returned at every step, it would be faulted in again: 2 to 3% of a step
export MALLOC_MMAP_THRESHOLD_ = 33554432
export MALLOC_TRIM_THRESHOLD_ = 4294967296

.PHONY: train plots test faults headline hosts clean
train: .venv/ready
	$(BIN)/torchrun --standalone --nproc-per-node 8 train.py --stages 4,4 --steps 600

# a small version of every row, compared with its expected numbers, into runs/plot: at most 15
# minutes on 2 idle cores. QUICK=1: a try of each, under 2 minutes, into runs/try
plots: .venv/ready
	$(BIN)/python -m experiments --scale $(if $(QUICK),try,plot)

# three tests at a time
test: .venv/ready
	$(BIN)/ruff check --quiet .
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

# every failure in every kind of job; then, by themselves, the tests that measure rates and times
faults: .venv/ready
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "faults and not alone"
	$(BIN)/python -m pytest -q -m alone

# the results and the pictures of docs/: about 16 hours on 2 cores. What results/ has is not made again
headline: .venv/ready
	$(BIN)/python -m experiments --scale full

# the rows that run between 8 hosts of this machine, as root: about 3 and 2 hours on 2 idle cores.
# What is finished is kept, and not run again. QUICK=1: a try
hosts: .venv/ready
	$(BIN)/python -m experiments.race --scale $(if $(QUICK),try,full)
	$(BIN)/python -m experiments.cities --scale $(if $(QUICK),try,full)

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	@echo "== installing into .venv: torch and its friends, some 300 MB, a minute or more"
	$(BIN)/pip install --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf .venv
