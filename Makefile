# make demo   sets up and runs two comparisons on embedded data, in two minutes on two cores
# make deploy-demo   three silos on this machine, over TLS, on Flower
# make bench NAME=kmeans   measures one thing beside its peers, see benchmarks/README.md
# make test   sets up, lints, type-checks and tests; .ci/run calls it
# make mutants   breaks the code on purpose and checks that the tests notice; minutes, outside CI
PYTHON ?= python3
BIN := .venv/bin
# One torch thread a process: two on shared cores can be many times slower.
export OMP_NUM_THREADS ?= 1

.PHONY: demo deploy-demo test test-real mutants bench format clean

PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e .
	touch $@

.venv/ready: .venv/demo
	$(PIP) -e '.[dev,flower,onnx]'
	touch $@

demo: .venv/demo
	$(BIN)/uefl demo

deploy-demo: .venv/ready
	$(BIN)/uefl deploy demo runs/deploy-demo-$$(date +%Y%m%d-%H%M%S)

test: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not real and not gpu"

test-real: .venv/ready
	$(BIN)/python -m pytest -m "real or gpu" -ra

mutants: .venv/ready
	$(BIN)/python -m mutants

.venv/bench: .venv/ready benchmarks/requirements.txt
	$(PIP) -r benchmarks/requirements.txt
	touch $@

bench: .venv/bench
	$(BIN)/python -m benchmarks $(NAME)

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
