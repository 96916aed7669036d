# Everything runs in $(VENV), which the first target sets up: Python 3.11 or newer, make and g++ are all it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := $(shell find ffi -type f) CMakeLists.txt
CPP_SOURCES := $(shell find ffi -name '*.cc' -o -name '*.h' -o -name '*.inl' -o -name '*.cu')
EXTRAS ?= dev
CPP_JOBS ?= 2
PYTEST_JOBS ?= 2
PYTEST_ARGS ?=

.PHONY: pretrain test pytest emulated cpp-test sanitize lint format bench clean

pretrain: $(READY)
	$(BIN)/python -m models.pretrain --compare $(ARGS)

test: cpp-test sanitize pytest emulated

# In PYTEST_JOBS processes, each with servers of its own; 0 runs all tests in one.
pytest: $(READY)
	$(BIN)/python -m pytest --numprocesses $(PYTEST_JOBS) --dist worksteal $(PYTEST_ARGS)

# Suites of optimizers, failures and meshes again, with CPU devices taken for accelerators.
emulated: $(READY)
	$(BIN)/python -m pytest --numprocesses $(PYTEST_JOBS) --dist worksteal --emulate 1 \
	  tests/test_optimizers.py tests/test_failures.py tests/test_accumulate_mesh.py

cpp-test: $(READY)
	$(call cpp,build/cpp,)

# The C++ tests under both sanitizers, and a short Python suite in a process with AddressSanitizer.
sanitize: $(READY)
	$(call cpp,build/asan,-DJMO_SANITIZE=address)
	$(call cpp,build/tsan,-DJMO_SANITIZE=thread)
	tests/run_under_asan.sh $(BIN)/python build/asan-python

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_SOURCES)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_SOURCES)

bench: $(READY)
	$(BIN)/python -m benchmarks.kernel
	$(BIN)/python -m benchmarks.step --params 50e6 --host-memory 170MB --steps 12

$(READY): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --verbose --editable '.[$(EXTRAS)]' > $(VENV)/install.log 2>&1 || \
	  { tail -n 100 $(VENV)/install.log; exit 1; }
	@grep -E 'CUDA|_native_cuda' $(VENV)/install.log  # what of it was compiled and linked, or why not
	touch $@

clean:
	rm -rf build dist $(VENV) runs

define cpp
	PATH=$(abspath $(BIN)):$$PATH cmake -S . -B $(1) -G Ninja -DJMO_PYTHON=OFF -DJMO_TESTS=ON $(2) > /dev/null
	PATH=$(abspath $(BIN)):$$PATH cmake --build $(1) -j $(CPP_JOBS)
	PATH=$(abspath $(BIN)):$$PATH ctest --test-dir $(1) -j $(CPP_JOBS) --output-on-failure
endef
