# `make test` is all that a fresh machine needs: Python 3.11 and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TRAINS := $(VENV)/.trains

.PHONY: install check kernels slurm suite test slow engines torch-suite bench bench-torch bench-recovery train soak docs figures dist clean

# Python compiles a module when it is first imported. Pip would compile all 18,000 of them.
unexport PYTHONDONTWRITEBYTECODE

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --quiet --constraint constraints.txt --editable '.[dev,jax,torch,train]'
	$(BIN)/python -c 'from meshmend.planning.compile_once import compile_once; compile_once()'
	touch $@

install: $(INSTALLED)

# `make test` runs tests meanwhile: mypy computes where they wait.
check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	nice $(BIN)/mypy
	nice $(BIN)/lint-imports

# What the tests would compile, twice where both of their processes need it at the same time.
kernels: $(INSTALLED)
	$(BIN)/python tests/helpers/compile_kernels.py

# Where Slurm is installed, a job under its real daemons; `make engines` tests more. All files are
# read, so that the processes of `make test` find them compiled.
slurm: $(INSTALLED)
	$(BIN)/pytest -m engines -rs -k 'test_slurm and (2x2-1x1 or accepts)'

# A file of tests stays in one process: what its tests share is made once. Four processes keep two
# cores busy, because many tests wait for processes of their own. Files are taken in the order of
# tests/conftest.py: those that wait and those that compute in turns, the longest first;
# pytest-xdist would begin with those of the most tests.
suite: kernels slurm
	$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

# The job under Slurm waits as long as the kernels take on one core, and the checks take longer than
# both: so they run beside the tests.
test: $(INSTALLED)
	@$(MAKE) --jobs 3 --no-print-directory check suite || \
		{ echo 'Something failed, maybe long before the end: see the lines with ***' >&2; exit 2; }

# The long sweeps, and all examples of the property tests, of which `make test` tries a third.
slow: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lightning]'
	$(BIN)/pytest --numprocesses 2 -m slow --hypothesis-profile thorough
	$(BIN)/pytest --numprocesses 2 -m 'hypothesis and not slow and not engines' --hypothesis-profile thorough

# Jobs under a real Slurm and a real Ray: one test at a time, because they measure how long a
# recovery takes.
engines: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/pytest -m engines -rs tests/engines

# PyTorch's own tests of torch.distributed: what passes with Gloo must pass with our backend. With
# CHECKOUT=FOLDER, a checkout of PyTorch's source, also those that its package does not carry.
torch-suite: $(INSTALLED)
	$(BIN)/python benchmarks/torch_suite.py
	$(if $(CHECKOUT),$(BIN)/python benchmarks/torch_suite.py --checkout $(CHECKOUT))

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/limit.py
	$(BIN)/python benchmarks/simgrid_compare.py
	$(BIN)/python benchmarks/trees.py
	$(BIN)/python benchmarks/sharded_update.py
	$(BIN)/python benchmarks/jax_lowering.py
	$(BIN)/python benchmarks/look_inside.py
	$(BIN)/python benchmarks/pods.py
	$(BIN)/python benchmarks/side_by_side.py

# PyTorch: what of the network, the data and the disk a step hides, next to DDP and Gloo; needs root.
bench-torch: $(INSTALLED)
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/in_flight.py
	$(BIN)/python benchmarks/reconfigure.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/save_pause.py

# Recovery next to torchft and a restart by torchrun, and by the size of the state; installs torchft
# into a venv of its own.
bench-recovery: $(INSTALLED)
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/state_size.py --optimizer frozen

# What `make train` needs and no more; nothing where everything is installed already.
$(TRAINS): pyproject.toml constraints.txt
	test -e $(INSTALLED) || $(PYTHON) -m venv $(VENV)
	test -e $(INSTALLED) || $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

# A tiny ResNet on 4x4 loses a board, goes on, gets it back; ends with a report.
train: $(TRAINS)
	$(BIN)/meshmend train resnet --mesh 4x4 --steps 120 \
		--inject "kill 2x2@0,2 at 40" --inject "repair 2x2@0,2 at 80"

MINUTES ?= 10
SEED ?= 1
soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --seed $(SEED)
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --seed $(SEED) --shard-optimizer
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) --seed $(SEED) --tile 2x2 --no-testbed

# The documentation as a site in site/: offline, every link checked. Open site/index.html; browsers
# let it search only behind a server, such as `python -m http.server --directory site`.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

figures: $(INSTALLED)
	$(BIN)/meshmend figures -o figures

# A wheel and a source distribution in dist/; tests/test_release.py installs the wheel.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m hatchling build --directory dist

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis figures site dist
