# make train: from nothing to a trained model, a figure of its loss and a sample.
# make test, make slow: the tests, fast and slow ones. make lint: style.
PYTHON ?= python3
ARGS ?=
RUN = .venv/bin/python
# TORCH_WARM_POOL=0: without processes that would compile for a GPU
ENV = OMP_NUM_THREADS=1 TORCH_WARM_POOL=0
DEVELOPMENT = pytest==9.2.0 pytest-xdist==3.8.0 ruff==0.17.6 scipy==1.17.1
OTHERS = lm-eval==0.4.13 transformers==5.23.0 safetensors==0.8.0 tokenizers==0.23.3 \
	accelerate==1.15.0 "triton==3.9.0; sys_platform == 'linux'"

train: .venv/ready
	$(RUN) prepare_c4.py
	$(RUN) train.py --out_dir=out/default --init_from=auto --log_interval=10 $(ARGS)
	$(RUN) plot.py loss out/default/loss.png out/default
	$(RUN) eval.py --out_dir=out/default --what=sample

test: .venv/ready-to-test
	$(ENV) $(RUN) -m pytest -q -n auto -m "not slow"

slow: .venv/ready-for-slow
	$(ENV) $(RUN) -m pytest -q -n auto --maxschedchunk=1 -m slow

lint: .venv/ready-to-test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt
	touch $@

.venv/ready-to-test: .venv/ready Makefile
	.venv/bin/pip install --quiet $(DEVELOPMENT)
	touch $@

.venv/ready-for-slow: .venv/ready-to-test Makefile
	.venv/bin/pip install --quiet $(OTHERS)
	touch $@

.PHONY: train test slow lint
