# make train: the main job. make test: the tests. Each sets up its own .venv first (Python 3.10 or newer).
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS = 1
# glibc: keep freed memory instead of returning it at every step and faulting it in again, 2 to 3% of a step
export MALLOC_MMAP_THRESHOLD_ = 33554432
export MALLOC_TRIM_THRESHOLD_ = 4294967296

.PHONY: train test figures emulate speed clean
train: .venv/ready
	$(BIN)/torchrun --standalone --nproc-per-node 8 train.py --stages 4,4 --steps 600 --inner-steps 10

test: .venv/ready
	$(BIN)/python -m pytest -q

# every picture, and the numbers behind it in results/: about 10 minutes on 2 cores, 14 GB of memory
figures: .venv/ready
	$(BIN)/python skippipe.py
	$(BIN)/python bench_sync.py --simulate
	$(BIN)/torchrun --standalone --nproc-per-node 2 bench_sync.py
	$(BIN)/torchrun --standalone --nproc-per-node 8 bench_sync.py
	for n in 4 8 16 32 64; do $(BIN)/torchrun --standalone --nproc-per-node $$n bench_sync.py --latency-ms 50 --latency-std 1 || exit; done

# the trainer beside others, and the README's table of it: about 8 minutes on 2 idle cores, 22 GB of memory
speed: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check transformers==5.23.0
	$(BIN)/python bench_sync.py --trainer

# the published instance on 20 processes over emulated links, four ways (random paths with a seed that avoids the broken link), about 4 minutes
emulate: .venv/ready
	mkdir -p runs && $(BIN)/python skippipe.py --save runs/links.json --figure '' --results ''
	rm -rf runs/emulated-* && : > results/skippipe_emulated.jsonl
	for routing in dtfm dtfm-skip no-tc2 skippipe; do \
		$(BIN)/torchrun --standalone --nproc-per-node 20 train.py --stages 5,3,3,3,3,3 --links runs/links.json --emulate --time-scale 0.1 \
			--routing $$routing --skip 0.33 --microbatches 6 --seed $$([ $$routing = dtfm-skip ] && echo 2 || echo 0) --layers 6 --hidden 32 --heads 2 \
			--mlp 64 --seq-len 16 --batch 1 --eval-sequences 5 --steps 5 --name emulated-$$routing || exit; \
		sed "s/^{/{\"routing\": \"$$routing\", /" runs/emulated-$$routing/metrics.jsonl >> results/skippipe_emulated.jsonl; done

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

clean:
	rm -rf .venv
