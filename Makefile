# make train: the main job. make test: the tests. Each sets up its own .venv first (Python 3.10+).
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS = 1
# glibc keeps freed memory. Returned at every step, it would be faulted in again: 2 to 3% of a step
export MALLOC_MMAP_THRESHOLD_ = 33554432
export MALLOC_TRIM_THRESHOLD_ = 4294967296

.PHONY: train plots test faults soak figures emulate headline hosts clean
train: .venv/ready
	$(BIN)/torchrun --standalone --nproc-per-node 8 train.py --stages 4,4 --steps 600

# the papers' headline plots beside their expected numbers, into runs/plots: at most 15 minutes on 2
# idle cores. QUICK=1: a try of each, under 2 minutes, into runs/plots/quick
plots: .venv/ready
	$(BIN)/python -m experiments.plots $(if $(QUICK),--quick)

# three tests at a time; then, by themselves, the tests that measure rates and times
test: .venv/ready
	$(BIN)/ruff check --quiet .
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not alone and not faults and not soak"
	$(BIN)/python -m pytest -q -m alone

# every failure in every kind of job; then 200 outer steps with a random one every ten
faults: .venv/ready
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not soak" -k "test_survive or takes or two_parts" \
		tests/test_survive.py tests/test_hosts.py

soak: .venv/ready
	$(BIN)/python -m pytest -q -s -m soak

# every picture and table that takes minutes, each command with its seconds: about 25 minutes on 2
# cores, 14 GB. QUICK=1: the same commands on less (under 3 minutes, 2 GB), into runs/quick, so that the
# README's figures stay
OUT := $(if $(QUICK),runs/quick,.)
PLAN := $(BIN)/python skippipe.py $(if $(QUICK),--seconds 2)
figures: SHELL := bash
figures: export TIMEFORMAT = == %0R s
figures: .venv/ready
	mkdir -p $(OUT)/results $(OUT)/figures && rm -rf runs/figures
	time $(BIN)/torchrun --standalone --nproc-per-node 8 train.py --stages 4,4 --steps $(if $(QUICK),10 --eval-sequences 8,600) --name figures
	time $(PLAN) --results $(OUT)/results/skippipe.json
	time $(PLAN) --sizes 7,5,5,5,5,5,5,5 --kept 6 --results ''
	$(if $(QUICK),,time $(BIN)/python -m planning.growth)
	time $(MAKE) --no-print-directory emulate
	time $(BIN)/python bench_sync.py --simulate --out $(OUT) $(if $(QUICK),--draws 0.05)
	time $(BIN)/python -m experiments.stability --out $(OUT) $(if $(QUICK),--steps 24)
	$(if $(QUICK),time $(BIN)/python -m experiments.failure --steps 4 --seeds 0 --out $(OUT))
	for n in 2 8; do time $(BIN)/torchrun --standalone --nproc-per-node $$n -m experiments.sync --out $(OUT) \
		$(if $(QUICK),--params 1e6 --trials 3) || exit; done
	time $(BIN)/python -m experiments.sync --out $(OUT)

# the papers' headline results, each with three seeds: about thirty hours on 2 cores.
# Runs that are in runs/ already are not run again
headline: .venv/ready
	for part in losses skip failure together stability noise variations; do \
		$(BIN)/python -m experiments.$$part --out . || exit; done

# loss against real time between 8 hosts of this machine: about ten hours on 2 idle cores, as root
# QUICK=1: a try between two by the same clock, into runs/quick
hosts: .venv/ready
	$(BIN)/python -m experiments.network $(if $(QUICK),grid --steps 5 --seeds 0) --out $(OUT)
	$(BIN)/python -m experiments.paced $(if $(QUICK),--steps 8 --seeds 0) --out $(OUT)
	$(BIN)/python -m experiments.points $(if $(QUICK),points --steps 5 --seeds 0) --out $(OUT)

# the published instance on 20 processes over emulated links, four ways, about 4 minutes
# (random paths with a seed that avoids the broken link)
emulate: .venv/ready
	mkdir -p runs $(OUT)/results && $(BIN)/python skippipe.py $(if $(QUICK),--seconds 1) --save runs/links.json --results ''
	rm -rf runs/emulated-* && : > $(OUT)/results/skippipe_emulated.jsonl
	for routing in $(if $(QUICK),skippipe,dtfm dtfm-skip no-tc2 skippipe); do \
		$(BIN)/torchrun --standalone --nproc-per-node 20 -m tools.emulate --stages 5,3,3,3,3,3 --links runs/links.json \
			--time-scale $(if $(QUICK),0.01 --steps 1,0.1 --steps 5) --routing $$routing --skip 0.33 --microbatches 6 \
			--seed $$([ $$routing = dtfm-skip ] && echo 2 || echo 0) --layers 6 --hidden 32 --heads 2 \
			--mlp 64 --seq-len 16 --batch 1 --eval-sequences 5 --name emulated-$$routing || exit; \
		sed "s/^{/{\"routing\": \"$$routing\", /" runs/emulated-$$routing/metrics.jsonl >> $(OUT)/results/skippipe_emulated.jsonl; done

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	@echo "== installing into .venv: torch and its friends, some 300 MB, a minute or more"
	$(BIN)/pip install --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf .venv
