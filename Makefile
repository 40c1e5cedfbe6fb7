# Needs python3 (3.11 or newer) and make; everything else is installed into .venv (and .venv-vllm for the real engines).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test check test-vllm bench figures policies reproduce accuracy speed diagnosis signals sequential compare peers limits chaos fuzz format clean

# PEP 660 install of this tree, with the locked versions of everything else.
$(STAMP): requirements/dev.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(STAMP)  ## play recorded traffic through a gateway and two emulated replicas, and show what was found
	$(BIN)/loraledger demo

test: $(STAMP)  ## every test that needs no vLLM
	$(BIN)/python -m pytest

check: $(STAMP)  ## lint, format, types, import contract, spelling, house numbers, references of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tools/house.py
	$(BIN)/python -m pytest -q tests/docs/test_docs.py

test-vllm: $(STAMP)  ## the same product in front of two real vLLM servers (CPU build, tiny model)
	tools/vllm_env.sh
	$(BIN)/python -m pytest -m vllm tests/vllm

bench: $(STAMP)  ## the figures of docs/benchmarks.md; see benchmarks/ for each one alone
	$(BIN)/python -m benchmarks.kernel
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.flat_memory --quick
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.journal
	$(BIN)/python -m benchmarks.adapters
	$(BIN)/python -m benchmarks.store
	$(BIN)/python -m benchmarks.twin
	$(BIN)/python -m benchmarks.replay_speed --quick
	$(BIN)/python -m benchmarks.policies --quick
	$(BIN)/python -m benchmarks.signals --quick

figures: $(STAMP)  ## kernel and twin again; writes their tables into docs/benchmarks.md
	mkdir -p .cache
	for name in kernel twin; do \
	  $(BIN)/python -m benchmarks.$$name --markdown > .cache/$$name.md && \
	  $(BIN)/python tools/section.py docs/benchmarks.md $$name < .cache/$$name.md || exit 1; \
	done

policies: $(STAMP)  ## the policy grid again, an hour; writes benchmarks/results/policies.txt and its table into docs/benchmarks.md
	mkdir -p .cache
	$(BIN)/python -m benchmarks.policies --seeds 3 --json .cache/policies.json > .cache/policies.txt
	cp .cache/policies.txt benchmarks/results/policies.txt
	$(BIN)/python -m benchmarks.policies --of .cache/policies.json --markdown > .cache/policies.md
	$(BIN)/python tools/section.py docs/benchmarks.md policies < .cache/policies.md

reproduce: $(STAMP)  ## published measurements, predicted: make reproduce DATA=DIR
	@test -n "$(DATA)" || { echo "make reproduce DATA=DIR: DIR holds the public results; docs/accuracy.md says which" >&2; exit 2; }
	mkdir -p .cache
	$(BIN)/python -m benchmarks.reproduce "$(DATA)" --markdown .cache/reproduce.md
	$(BIN)/python tools/section.py docs/accuracy.md reproduce < .cache/reproduce.md

accuracy: $(STAMP)  ## a real vLLM, calibrated and predicted; an hour and a half on a quiet machine
	tools/vllm_env.sh
	mkdir -p .cache
	$(BIN)/python -m benchmarks.accuracy --markdown > .cache/accuracy.md
	$(BIN)/python tools/section.py docs/accuracy.md accuracy < .cache/accuracy.md

speed: $(STAMP)  ## how fast a replay is beside its peers; writes its tables into docs/accuracy.md
	mkdir -p .cache
	$(BIN)/python -m benchmarks.replay_speed --long --markdown > .cache/speed.md
	$(BIN)/python tools/section.py docs/accuracy.md speed < .cache/speed.md

diagnosis: $(STAMP)  ## incidents drawn on twins, diagnosed: confusion matrices; writes docs/benchmarks.md, ten minutes
	mkdir -p .cache
	$(BIN)/python -m benchmarks.diagnosis --markdown > .cache/diagnosis.md
	$(BIN)/python tools/section.py docs/benchmarks.md diagnosis < .cache/diagnosis.md
	$(BIN)/python -m benchmarks.diagnosis --first-seed 100 --markdown > .cache/diagnosis-unseen.md
	$(BIN)/python tools/section.py docs/benchmarks.md diagnosis-unseen < .cache/diagnosis-unseen.md

signals: $(STAMP)  ## diagnose and advise over 100 million requests, made in .cache first (8 GB); writes docs/benchmarks.md
	mkdir -p .cache
	$(BIN)/python -m benchmarks.signals --markdown > .cache/signals.md
	$(BIN)/python tools/section.py docs/benchmarks.md signals < .cache/signals.md

sequential: $(STAMP)  ## how often the test of a rollout errs, by 4,000 replayed rollouts, an hour; writes docs/operate.md
	mkdir -p .cache
	$(BIN)/python -m benchmarks.sequential --markdown > .cache/sequential.md
	$(BIN)/python tools/section.py docs/operate.md sequential < .cache/sequential.md

compare: $(STAMP)  ## 20 candidates x 3 policies on 100,000 requests, half an hour; writes docs/benchmarks.md
	mkdir -p .cache
	$(BIN)/python -m benchmarks.compare --slots 16 --markdown > .cache/compare.md
	$(BIN)/python -m benchmarks.compare --requests 1000 --markdown >> .cache/compare.md
	$(BIN)/python tools/section.py docs/benchmarks.md compare < .cache/compare.md

peers: $(STAMP)  ## the gateway beside nine other proxies on one core, and where its CPU goes; writes docs/performance.md, half an hour
	mkdir -p .cache
	$(BIN)/python -m benchmarks.gateway_peers --markdown --json .cache/peers.json > .cache/peers.md
	$(BIN)/python tools/section.py docs/performance.md peers < .cache/peers.md
	$(BIN)/python -m benchmarks.gateway --profile --markdown > .cache/profile.md
	$(BIN)/python tools/section.py docs/performance.md profile < .cache/profile.md

limits: $(STAMP)  ## a flood, 10,000 idle connections, a million requests; writes docs/performance.md, 25 minutes
	mkdir -p .cache
	missed=0; for name in fairness idle_connections flat_memory; do \
	  $(BIN)/python -m benchmarks.$$name --markdown > .cache/$$name.md || missed=1; \
	  $(BIN)/python tools/section.py docs/performance.md $$name < .cache/$$name.md || missed=1; \
	done; exit $$missed

chaos: $(STAMP)  ## ten minutes of faults over two vLLM servers and two emulators; writes docs/performance.md
	tools/vllm_env.sh
	mkdir -p .cache
	missed=0; $(BIN)/python -m benchmarks.chaos --markdown --json .cache/chaos.json > .cache/chaos.md || missed=1; \
	  $(BIN)/python tools/section.py docs/performance.md chaos < .cache/chaos.md && exit $$missed

fuzz: $(STAMP)  ## readers of adapter files and of the wire against hostile input, five minutes each; the twin against its oracle
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	$(BIN)/python tests/fuzz/run.py header --seconds 300
	$(BIN)/python tests/fuzz/run.py config --seconds 300
	$(BIN)/python tests/fuzz/run.py http --seconds 300
	$(BIN)/python tests/fuzz/run.py sse --seconds 300
	$(BIN)/python tests/fuzz/run.py peek --seconds 300
	TWIN_EXAMPLES=10000 $(BIN)/python -m pytest tests/twin/test_against_oracle.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-vllm .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
