#!/usr/bin/env bash
# Checks and tests the repository.
set -euo pipefail

usage="usage: scripts/test.sh [pytest arguments]

Makes .venv as scripts/start.sh does. Without arguments: ruff, mypy, then all tests, in two processes side by side. With
arguments: only pytest, with them and in one process; paths are those seen from the repository, as in
scripts/test.sh tests/test_scripts.py -k lock"

here=$(readlink -f -- "${BASH_SOURCE[0]}") # test.sh itself, also when called through a symlink
root=$(dirname -- "$(dirname -- "$here")")
# shellcheck source=scripts/_venv.sh
. "$root/scripts/_venv.sh" "$root"

case ${1:-} in -h | --help) printf '%s\n' "$usage" && exit ;; esac

prepare_venv
cd "$root"
if [ $# -eq 0 ]; then
  for check in "ruff check ." "ruff format --check ." "mypy"; do
    say "$check"
    # shellcheck disable=SC2086 # a command and its arguments
    "$venv/bin/python" -m $check || die "$check has complaints (see above)"
  done
  # Each worker starts on one half of the tests, in their order, and takes over from the other when it is done: most
  # files stay in one process, with what their tests share. No thread has a core to itself, so none spins for long. A
  # third worker makes it slower on two cores, by a twelfth.
  set -- -n 2 --dist worksteal
  export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
fi
say "pytest${*:+ $*}"
exec "$venv/bin/python" -m pytest "$@"
