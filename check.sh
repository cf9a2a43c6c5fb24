#!/usr/bin/env bash
# Everything that CI checks, in the current environment. Usage: ./check.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")"
ruff check .
ruff format --check .
mypy
pytest "$@"
