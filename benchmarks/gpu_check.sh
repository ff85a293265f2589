#!/usr/bin/env bash
# One card of 80 to 140 GB, checked and timed in less than eight minutes; prints one table.
#
#   benchmarks/gpu_check.sh [what benchmarks/gpu_check.py takes]
#
# PYTHON=/path/to/python   another interpreter than .venv/bin/python (or python3 where there is none)
# WHEELS=/a/folder         packages to install what is missing from; nothing is ever fetched from elsewhere
#
# What is missing and cannot be installed leaves out the rows that need it, with the reason, not the rest.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

limit_seconds=478
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "no python3 here; set PYTHON" >&2; exit 1; }

for name in torch transformers accelerate datasets omegaconf; do
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$name') is None)" && continue
  if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --find-links "$WHEELS" "$name" >&2
  fi
done
for package in flash-attn:flash_attn liger-kernel:liger_kernel; do
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('${package#*:}') is None)" && continue
  if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" "${package%:*}" >&2 ||
      echo "${package%:*} is not in $WHEELS: its rows are left out" >&2
  fi
done

# Whatever hangs in spite of its own limit ends with this one.
exec timeout --kill-after=2 "$limit_seconds" "$python" benchmarks/gpu_check.py "$@"
