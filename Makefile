# make train: the main job. make test: the tests. Each sets up its own .venv first (Python 3.10 or newer).
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS = 1

.PHONY: train test clean
train: .venv/ready
	$(BIN)/torchrun --standalone --nproc-per-node 8 train.py --stages 4,4 --steps 500 --inner-steps 10

test: .venv/ready
	$(BIN)/python -m pytest -q

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf .venv
