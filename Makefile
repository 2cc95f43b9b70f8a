# make train: from nothing to a trained model, a figure of its loss and a sample. make test, make slow: the tests.
PYTHON ?= python3
ARGS ?=
RUN = .venv/bin/python

train: .venv/ready
	$(RUN) prepare_c4.py
	$(RUN) train.py --out_dir=out/default --init_from=auto $(ARGS)
	$(RUN) plot.py loss out/default/loss.png out/default
	$(RUN) eval.py --out_dir=out/default --what=sample

test: .venv/ready-to-test
	$(RUN) -m pytest -q -n auto -m "not slow"

slow: .venv/ready-to-test
	$(RUN) -m pytest -q -n auto -m slow

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt
	touch $@

.venv/ready-to-test: .venv/ready
	.venv/bin/pip install --quiet lm-eval==0.4.13
	touch $@

.PHONY: train test slow
