# The face of the repository: `make help` lists the verbs. CI calls the same ones.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 4
RUNS   ?= 200
VLLM   ?= .vllm
CLIENTS ?= langchain litellm llama-index instructor pydantic-ai openai-agents lm-eval guidellm aiperf envoy axolotl check-jsonschema validate-pyproject-schema-store
WITH_VLLM = $(or $(DIPTYCH_VLLM),$(VLLM))
# Schedules that `simulate` runs.
N      ?= 100000

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-vllm test-clients test-images chaos simulate lint docs screenshots cast audit format bench gpu gpu-wheels lock crds dist images cluster e2e clean vllm llamacpp clients

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# It says in a sentence what is wrong with a system or a Python that will not do.
INSTALL = @command -v $(PYTHON) >/dev/null || { echo "Diptych needs Python 3.11 to 3.14: apt-get install python3 python3-venv"; exit 1; }; \
	$(PYTHON) install.py --venv $(VENV)

$(VENV)/.demo: pyproject.toml requirements.lock install.py
	$(INSTALL) demo
	@touch $@

$(VENV)/.test: pyproject.toml requirements.lock install.py
	$(INSTALL) test
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo ## one prefill and one decode process, a router, and a streamed answer
	$(BIN)/diptych demo examples/smollm2.yaml

# Tests start some hundred processes, which would each compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.test ## each behaviour that needs no cluster and no GPU, in minutes
	$(BIN)/python -m diptych_kernels
	$(PYTEST) -m "not slow and not vllm and not clients and not images"

# Where no test is slow, and none draws a level or its cases, a file is not read.
test-slow: $(VENV)/.test ## what takes long, of which `test` has a quicker form
	$(BIN)/python -m diptych_kernels
	$(PYTEST) -m "slow and not vllm and not clients and not images" \
		$$(grep -rlwE "slow|one_in|level|compiled_level" tests --include="test_*.py" | sort)

test-all: test test-slow ## both, one after the other

test-vllm: $(VENV)/.test ## what needs a real vLLM, of `make vllm` or DIPTYCH_VLLM=DIR; QUICK=1 for CI's choice
	@[ -x "$(WITH_VLLM)/bin/vllm" ] || \
	{ echo "vLLM is not in $(WITH_VLLM): \`make vllm\` installs it, or DIPTYCH_VLLM names where it is"; exit 1; }
	DIPTYCH_VLLM="$(WITH_VLLM)" $(BIN)/pytest -n 0 -m "vllm$(if $(QUICK), and not slow)"

test-clients: $(VENV)/.test ## what needs the clients of `make clients` or DIPTYCH_CLIENTS=DIR; QUICK=1 leaves out what is slow
	$(BIN)/pytest -n 0 -m "clients$(if $(QUICK), and not slow)"

test-images: $(VENV)/.test ## build docker/*.Dockerfile, as root, with Debian's buildah and mmdebstrap, and run what they make
	$(BIN)/pytest -n 0 -s -m images tests/charts/test_built_images.py

chaos: $(VENV)/.test ## RUNS=200 faults under load on real processes, SEED=n to play them again; docs/chaos.md
	PYTHONPATH=tests/support $(BIN)/python tests/chaos --runs $(RUNS) $(if $(SEED),--seed $(SEED))
	$(if $(SEED),,DIPTYCH_TEST_MESSAGES=1000000 DIPTYCH_TEST_REJECTIONS=100 \
		DIPTYCH_TEST_REPLACEMENTS=100 DIPTYCH_TEST_CALLS=100000 $(BIN)/pytest --timeout 7200 -q -s tests/chaos \
		tests/kv_transfer/tables/test_hinge_hostile.py tests/contract/wire/test_every_call_is_answered.py)
	$(if $(SEED),,PYTHONPATH=tests/support $(BIN)/python tests/chaos/rude_service.py)

simulate: $(VENV)/.test ## N=100000 schedules of faults in a simulated service, SEED=n replays one; docs/simulation.md
	$(BIN)/python tests/simulation/explore.py $(if $(SEED),--seed $(SEED),--count $(N) $(if $(FIRST),--first $(FIRST)))

lint: $(VENV)/.test ## style, types, the arrows between the rooms, workflows, scripts, Dockerfiles and Kubernetes objects
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/actionlint .github/workflows/*.yml
	! [ -x $(BIN)/shellcheck ] || $(BIN)/shellcheck .ci/run .github/*.sh e2e/kind/*.sh
	$(BIN)/hadolint --config docker/hadolint.yaml docker/*.Dockerfile
	PYTHONPATH=tests/support $(BIN)/python -m cluster_kit.kube_schemas
	$(MAKE) audit

OSV := https://api.osv.dev/v1
docs: $(VENV)/.test ## the site, into build/site; a link or a path that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

screenshots: $(VENV)/.test ## the pictures of the page in docs/images, from a service on this machine; needs Chromium
	PYTHONPATH=tests/support $(BIN)/python docs/screenshots.py

cast: $(VENV)/.test ## the recording of a terminal in docs/casts, of a service on this machine
	$(BIN)/python docs/cast.py

audit: $(VENV)/.test ## known weaknesses of the locked dependencies, where OSV's database can be reached
	@if $(BIN)/python -c "from urllib.request import urlopen; urlopen('$(OSV)/vulns/OSV-2020-111', timeout=10)" 2>/dev/null; \
	then $(BIN)/pip-audit --progress-spinner off --vulnerability-service osv --osv-url $(OSV)/query \
		--disable-pip --no-deps --requirement requirements.lock; \
	else echo "audit skipped: $(OSV) cannot be reached from here"; fi

format: $(VENV)/.test ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test ## measure, beside PEERS=vllm=PYTHON,llamacpp=PYTHON if any, QUICK=1 for less; docs/performance.md
	$(BIN)/python -m benchmarks $(if $(PEERS),--peers $(PEERS)) $(if $(QUICK),--quick)
	$(BIN)/python -m benchmarks.handoff

# A machine that is lent has a python3 with torch and Triton, no network, and nothing installed.
GPU_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
gpu: $(if $(DRY),$(VENV)/.test) ## all that a GPU can tell in 480 s, into OUT=dir; STAGES=3,6 for some, DRY=1 rehearses; docs/gpu.md
	$(GPU_PYTHON) -m benchmarks.gpu --out $(or $(OUT),$(error OUT=dir says where the results go)) \
		$(if $(STAGES),--stages $(STAGES)) $(if $(DRY),--dry)

gpu-wheels: $(VENV)/.test ## what such a machine lacks, as wheels in build/gpu-wheels; UCX=1 for the last stage's, too
	$(BIN)/python -m benchmarks.gpu.wheels $(if $(UCX),--ucx)

vllm: ## vLLM's CPU build in $$VLLM, an environment of its own, for the tests that need it; docs/vllm.md
	$(PYTHON) install_vllm.py --venv $(VLLM) $(if $(VLLM_VERSION),--version $(VLLM_VERSION))

llamacpp: ## llama.cpp, in .peers, for the benchmarks and slow tests that compare with it; docs/performance.md
	benchmarks/peers/install.sh .peers llamacpp

clients: ## $$CLIENTS that others wrote, and packages whose data files are read, each in .clients, for `test-clients`; docs/clients.md
	$(PYTHON) install_clients.py $(CLIENTS)

lock: ## write requirements.lock anew, after a change of the pins in pyproject.toml
	$(INSTALL) lock

crds: $(VENV)/.demo ## write the CRD, its reference and the chart's copy anew from the types
	$(BIN)/python -m diptych_operator.api.crd
	$(BIN)/python charts/generate.py
	$(BIN)/python docs/reference_pages.py

dist: $(VENV)/.test ## the wheel and the sdist, into dist; the wheel is built of the sdist
	rm -rf dist
	$(BIN)/uv build --no-build-isolation --python $(BIN)/python --out-dir dist

images: $(VENV)/.test ## the three container images, made without docker and loaded into a `kube` cluster; DOCKERFILES=1 by buildah
	$(BIN)/python -m diptych_kernels
	PYTHONPATH=$(CURDIR) $(BIN)/python e2e/images.py $(if $(DOCKERFILES),--dockerfiles) $(if $(wildcard $(VLLM)/bin/vllm),--vllm $(VLLM))

cluster: $(VENV)/.test ## tests of operator, CRD, chart and plugin that need an API server, that of $$KUBECONFIG
	export DIPTYCH_TEST_KUBECONFIG=$${KUBECONFIG:-$$HOME/.kube/config}; \
	$(BIN)/pytest --timeout 600 tests/charts/test_chart_on_cluster.py -k the_crds_are_upgraded && \
	KUBECONFIG=$$DIPTYCH_TEST_KUBECONFIG PYTHONPATH=tests/support $(BIN)/python -m cluster_kit.apply_crds && \
	$(BIN)/pytest --timeout 600 -n $(JOBS) --dist loadfile tests/*/test_*_on_cluster.py tests/operator/on_cluster/test_*_on_cluster.py

e2e: $(VENV)/.test ## install, chat, disrupt and count, on the cluster of $$KUBECONFIG, QUICK=1 for less; see e2e/README.md
	$(BIN)/python -m pytest e2e$(if $(QUICK), -m "not slow")

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
