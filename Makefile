# make demo: a model learns to reason while you watch.  make llm: a pretrained one learns a task.  make agent: it learns
# to use a tool.  make game: it learns a game.  make taught: one that can solve puzzles, to go on from.  make test: lint
# and tests.  All set up what they need.

PYTHON ?= python3
VENV ?= .venv
SITE_VENV ?= .venv-site
GPU_VENV ?= .venv-gpu-paths
PY = $(VENV)/bin/python
PIP = $(PY) -m pip install --quiet --disable-pip-version-check
MARP = .marp/node_modules/.bin/marp
SMOLLM = models/SmolLM2-135M-Instruct
TAUGHT = models/SmolLM2-135M-KK
GPU := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c GPU)
TORCH_CPU_WHEELS = https://download.pytorch.org/whl/cpu

ifeq ($(GPU),0)
REQUIREMENTS = requirements-cpu.txt
KIND = cpu
else
REQUIREMENTS = requirements.txt
KIND = gpu
endif

.PHONY: install doctor model taught demo llm agent game watch test test-all gpu-paths bench lab docs site slides lint format

install: $(VENV)/installed

$(VENV)/installed: $(REQUIREMENTS) requirements-common.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON): apt install python3-venv" >&2; exit 1; }
	@test ! -x $(PY) || $(PY) tools/prerequisites.py $(KIND)
	@test -x $(PY) || { $(PYTHON) tools/prerequisites.py $(KIND) && $(PYTHON) -m venv $(VENV); }
	@# uv's environments have no pip
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip >/dev/null
ifeq ($(GPU),0)
	@# torch's CPU build first, or what follows would bring gigabytes of CUDA; not every index has it
	@echo "installing torch"
	@$(PIP) torch==2.13.0+cpu 2>/dev/null || $(PIP) torch==2.13.0+cpu --extra-index-url $(TORCH_CPU_WHEELS)
endif
	@echo "installing $(REQUIREMENTS); this takes a few minutes"
	@$(PIP) -r $(REQUIREMENTS)
ifeq ($(GPU),0)
	@# vLLM's CPU build asks for these, and what comes was built for CUDA; language models do without (runtime/sampler.py)
	@$(PY) -c "import torchvision" 2>/dev/null || $(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@

$(VENV)/installed-test: requirements-test.txt requirements-gym.txt | $(VENV)/installed
	$(PIP) -r requirements-test.txt
	@# a part of it is built with a C compiler; GitHub's machines have one, and npm: there nothing may be skipped
	$(PIP) -r requirements-gym.txt || { \
		echo "reasoning-gym is not installed: the tests of rewards/gym.py will be skipped"; test -z "$$GITHUB_ACTIONS"; }
	touch $@

doctor: install
	$(PY) -m tools.doctor

model: $(SMOLLM)/model.safetensors

$(SMOLLM)/model.safetensors: | $(VENV)/installed
	$(PY) -m tools.get_smollm2 $(SMOLLM)

taught: $(TAUGHT)/model.safetensors

$(TAUGHT)/model.safetensors: | $(SMOLLM)/model.safetensors
	$(PY) -m tools.merge models/smollm2_kk $(TAUGHT)

demo: install
	$(PY) grpo_ar_lopti.py --alpha 0.3 --eta 0.5

llm: install model
	$(PY) grpo_ar_lopti.py --alpha 0.3 --eta 0.5 --kl_coef 0 --lr 3e-5 --temperature 1 \
		--model $(SMOLLM) --task rewards/largest.py --steps 12 --eval_every 4 --eval_size 128 \
		--prompts_per_step 8 --responses_per_prompt 16 --updates_per_step 1 --max_response_tokens 16 \
		--micro_batch_tokens 1024 --kv_cache_gb 0.25

agent: install model
	$(PY) grpo_multi_turn.py --task calculator --max_turns 3 --steps 5 --eval_every 5 --eval_size 32 \
		--model $(SMOLLM) --kl_coef 0 --lr 2e-5 --temperature 1 --prompts_per_step 6 \
		--responses_per_prompt 8 --updates_per_step 1 --max_response_tokens 96 \
		--micro_batch_tokens 2048 --kv_cache_gb 0.5

game: install model combined_gigpo_entropy_bonus.py
	$(PY) combined_gigpo_entropy_bonus.py --task guess --max_turns 5 --steps 80 --eval_every 10 --eval_size 60 \
		--eval_temperature 1 --model $(SMOLLM) --episode_weight 0 --gamma 0.5 --anchors step --no_turn_std \
		--entropy_coef 0.005 --kl_coef 0 --lr 2e-5 --temperature 1 --prompts_per_step 24 --responses_per_prompt 2 \
		--updates_per_step 1 --max_response_tokens 96 --micro_batch_tokens 4096 --kv_cache_gb 0.5

combined_gigpo_entropy_bonus.py: gigpo.py entropy_bonus.py tools/combine.py | $(VENV)/installed
	rm -f $@
	$(PY) -m tools.combine gigpo entropy_bonus --out $@

watch: install
	$(PY) -m tools.watch runs

test:
	@# the site's environment is set up beside the other one
	@$(MAKE) --no-print-directory --jobs 2 lint $(SITE_VENV)/installed
	@$(MAKE) --no-print-directory model
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test-all:
	@$(MAKE) --no-print-directory --jobs 2 lint $(SITE_VENV)/installed
	@$(MAKE) --no-print-directory model
	@$(MAKE) --no-print-directory $(MARP) || { echo "the tests that build slides will be skipped"; test -z "$$GITHUB_ACTIONS"; }
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	$(PY) -m tools.maintain.mutations

# Without a GPU: CUDA's build of vLLM, in a venv of its own (9 GB), believes that there is one.
gpu-paths: $(GPU_VENV)/installed
	$(GPU_VENV)/bin/python tests/gpu_paths.py

$(GPU_VENV)/installed: requirements.txt requirements-common.txt
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

bench: install model
	$(PY) benchmarks/limit.py
	$(PY) benchmarks/limit.py --prompts 2 --response_tokens 32 --name limit_32
	$(PY) benchmarks/limit.py --prompts 2 --response_tokens 128 --name limit_128
	$(PY) benchmarks/limit.py --prompts 2 --responses 4 --response_tokens 512 --name limit_512
	$(PY) benchmarks/operations.py
	$(PY) benchmarks/against_trl.py
	$(PY) benchmarks/growth.py
	$(PY) benchmarks/busy.py
	$(PY) benchmarks/report.py

lab: install model
	$(PY) -m lab.lens
	$(PY) -m lab.who_dominates
	$(PY) -m lab.right_direction
	$(PY) -m lab.proposition
	$(PY) -m lab.off_policy
	$(PY) -m lab.reversal
	$(PY) -m lab.key_factors
	$(PY) -m lab.forking_tokens
	$(PY) -m lab.two_tasks
	$(MAKE) runs/lab_stages
	$(PY) -m lab.stages --smollm2

runs/lab_stages: | install model
	$(PY) grpo.py --model models/kk_tiny --task kk --steps 10 --save_every 5 --keep_checkpoints 10 --eval_every 10 --run_dir $@

docs: install
	$(PY) -m tools.maintain.fits
	TQDM_DISABLE=1 $(PY) -m tools.maintain.pages
	$(PY) -m tools.maintain.pictures

lint: install $(VENV)/installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m ty check --python $(VENV)

format: install $(VENV)/installed-test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

site: $(SITE_VENV)/installed
	$(SITE_VENV)/bin/python -m tools.maintain.site

# A venv of its own: who builds the site, as .github/workflows/site.yml does, needs neither torch nor vLLM.
$(SITE_VENV)/installed: requirements-site.txt
	test -x $(SITE_VENV)/bin/python || $(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-site.txt
	touch $@

slides: $(MARP) $(SITE_VENV)/installed
	$(SITE_VENV)/bin/python -m course.slides

# Marp makes slides of Markdown. Its HTML is one file, with a view for the presenter.
$(MARP):
	@npm --version >/dev/null 2>&1 || { echo "error: slides need Node.js 18 or later with npm (on Debian: apt install nodejs npm)" >&2; exit 1; }
	npm install --no-save --no-audit --no-fund --loglevel=error --fetch-retries=1 --prefix .marp @marp-team/marp-cli@4.5.1
