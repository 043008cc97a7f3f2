# Every target is one call of one tool; scripts/setup.sh installs what the target needs, once.
SHELL := /bin/sh
BIN := .venv/bin
MODEL ?= demo/base
ARGS ?=
IMAGES ?=
REGISTRY ?=

# Tests of the parts that never import torch; they run wherever Python runs.
TORCH_FREE := tests/test_*.py tests/sdk tests/cli tests/adapter_format tests/common tests/registry \
	tests/workload tests/simulate tests/gateway tests/deploy \
	tests/worker/adapters/device/test_copy_events.py tests/worker/adapters/device/test_pinned_pool.py \
	tests/worker/adapters/fetch tests/worker/adapters/pack/test_tiles.py tests/worker/cache \
	tests/worker/engine/test_adapter_checks.py tests/worker/engine/test_adapter_loads.py \
	tests/worker/engine/test_step_trace.py \
	tests/worker/grammars/test_checker.py tests/worker/grammars/test_constraint.py \
	tests/worker/scheduling tests/worker/server tests/worker/types \
	tests/worker/test_config.py tests/worker/test_cores.py

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-long test-gpu test-aarch64 test-s3 deploy-test compose-test test-torch-free lint type protos protos-check \
	bench fmt clean images push

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

setup: ## Make .venv with everything that running, testing and developing needs
	@GOAL=$@ scripts/setup.sh run test dev

demo: ## Publish the bundled adapters, decode them in one batch, check every answer
	@GOAL=$@ scripts/setup.sh run
	@$(BIN)/python -m demo.run $(ARGS)

up: ## Run the whole stack in the foreground: make up MODEL=DIR ARGS='--http-port 8080'
	@GOAL=$@ scripts/setup.sh run
	@exec $(BIN)/loraplex up --model $(MODEL) $(if $(filter demo/base,$(MODEL)),--served-model-name loraplex-demo) $(ARGS)

test: ## Run the tests (up to 10 minutes on 2 cores)
	@GOAL=$@ scripts/setup.sh run test
	@[ "$$(uname -sm)" != "Linux x86_64" ] || [ -x $(BIN)/helm ] || scripts/helm.sh || echo "tests of the chart are skipped"
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: ## Run the fuzzers, soaks and kill loops
	@GOAL=$@ scripts/setup.sh run test
	@$(BIN)/pytest -m long --timeout 0 $(ARGS)

test-gpu: ## Run the tests that need a CUDA device, on 8 processes: make test-gpu ARGS='-n 2'
	@GOAL=$@ scripts/setup.sh run test
	@mkdir -p build
	@$(BIN)/pytest -m gpu -n 8 --timeout 300 --junitxml build/test-gpu.xml --durations 15 $(ARGS)

test-aarch64: ## Run the tests of the CPU kernels under an emulator of aarch64 (Debian or Ubuntu)
	@GOAL=$@ scripts/setup.sh run test
	@scripts/aarch64.sh -m pytest -q --timeout 0 -p no:cacheprovider -k 'not compiler and not builds' \
		--ignore tests/worker/ops/attention/test_registered.py \
		tests/worker/native tests/worker/ops/attention tests/worker/ops/lora tests/worker/ops/recurrence $(ARGS)

test-s3: ## Run the tests of the object store and the registry on real S3 servers
	@GOAL=$@ scripts/setup.sh run test
	@scripts/s3_server.sh ceph $(BIN)/pytest -m s3 $(ARGS)
	@scripts/s3_server.sh s3rver $(BIN)/pytest -m s3 tests/registry/test_s3_servers.py

deploy-test: ## Run the manifests of deploy/k8s on this machine, in network namespaces (Linux, root)
	@GOAL=$@ scripts/setup.sh run test
	@scripts/deploy_test.sh $(BIN)/pytest -m cluster -p no:cacheprovider tests/deploy/cluster $(ARGS)

compose-test: ## Run deploy/compose.yaml with Docker, and the demo through it
	@GOAL=$@ scripts/setup.sh run test
	@$(BIN)/pytest -m cluster tests/deploy/test_compose.py $(ARGS)

test-torch-free: ## Run the tests of all parts that do without torch: make test-torch-free PYTHON=python3.13
	@scripts/test_torch_free.sh $(TORCH_FREE)

lint: ## Check style, import rules, stubs, sizes and protos; changes nothing
	@GOAL=$@ scripts/setup.sh run test dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_sizes.py
	@scripts/protos.sh check
	@scripts/lint_protos.sh

type: ## Check types: services and SDK strictly, tests and tools for names and calls
	@GOAL=$@ scripts/setup.sh run test dev
	@$(BIN)/mypy

protos: ## Regenerate loraplex/v1 from protos/loraplex/v1
	@GOAL=$@ scripts/setup.sh run dev
	@scripts/protos.sh write

protos-check: ## Fail when loraplex/v1 is not what the protos generate
	@GOAL=$@ scripts/setup.sh run dev
	@scripts/protos.sh check

bench: ## Run the short benchmarks (about 3 minutes on 2 idle cores); all: .venv/bin/python -m benchmarks list
	@GOAL=$@ scripts/setup.sh run test
	@$(BIN)/python -m benchmarks quick

fmt: ## Format and sort imports
	@GOAL=$@ scripts/setup.sh run test dev
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean: ## Remove environments, caches and the demo's state
	rm -rf .venv .venv-3.* .demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

images: ## Build the container images with docker, podman or buildah: make images IMAGES=loraplex-worker:0.1.0
	@scripts/images.sh build $(IMAGES)

push: ## Push the images: make push REGISTRY=ghcr.io/my-org
	@scripts/images.sh push $(REGISTRY)
