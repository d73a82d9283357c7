# make demo: a model learns to reason while you watch.  make test: lint and all tests.  Both set up what they need.

PYTHON ?= python3
VENV ?= .venv
SITE_VENV ?= .venv-site
PY = $(VENV)/bin/python
PIP = $(PY) -m pip install --quiet --disable-pip-version-check
SMOLLM = models/SmolLM2-135M-Instruct
GPU := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c GPU)
TORCH_CPU_WHEELS = https://download.pytorch.org/whl/cpu

ifeq ($(GPU),0)
REQUIREMENTS = requirements-cpu.txt
else
REQUIREMENTS = requirements.txt
endif

.PHONY: install doctor model demo watch test bench lab table docs site lint format

install: $(VENV)/installed

$(VENV)/installed: $(REQUIREMENTS) requirements-common.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
ifeq ($(GPU),0)
	@# torch's CPU build first, or what follows would bring gigabytes of CUDA; not every index has it
	$(PIP) torch==2.13.0+cpu || $(PIP) torch==2.13.0+cpu --extra-index-url $(TORCH_CPU_WHEELS)
endif
	@echo "installing $(REQUIREMENTS); this takes a few minutes"
	$(PIP) -r $(REQUIREMENTS)
ifeq ($(GPU),0)
	@# vLLM's CPU build asks for these, and what comes was built for CUDA; text models do without
	$(PY) -c "import torchvision" 2>/dev/null || $(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@

doctor: install
	$(PY) -m tools.doctor

model: $(SMOLLM)/model.safetensors

$(SMOLLM)/model.safetensors: | $(VENV)/installed
	$(PY) -m tools.get_smollm2 $(SMOLLM)

demo: install
	$(PY) grpo_ar_lopti.py --alpha 0.3 --eta 0.5

watch: install
	$(VENV)/bin/tensorboard --logdir runs

test: install model lint $(SITE_VENV)/installed
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

bench: install model
	$(PY) benchmarks/limit.py
	$(PY) benchmarks/operations.py
	$(PY) benchmarks/against_trl.py
	$(PY) benchmarks/growth.py
	$(PY) benchmarks/report.py

lab: install model
	$(PY) -m lab.lens
	$(PY) -m lab.who_dominates
	$(PY) -m lab.right_direction
	$(PY) -m lab.proposition
	$(PY) -m lab.off_policy
	$(PY) -m lab.key_factors
	$(PY) -m lab.forking_tokens
	$(PY) -m lab.two_tasks
	$(PY) -m lab.stages --smollm2

table: install
	$(PY) tools/table.py
	$(PY) -m tools.fits

docs: table
	$(PY) -m tools.pages
	$(PY) -m tools.claims

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: install
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

site: $(SITE_VENV)/installed
	$(SITE_VENV)/bin/python -m tools.site

# A venv of its own: who builds the site, as .github/workflows/site.yml does, needs neither torch nor vLLM.
$(SITE_VENV)/installed: requirements-site.txt
	test -x $(SITE_VENV)/bin/python || $(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-site.txt
	touch $@
