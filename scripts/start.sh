#!/usr/bin/env bash
# From a fresh clone to a look at what refspec does, in one command.
set -euo pipefail

usage="usage: scripts/start.sh [--no-serve]

Makes .venv in the repository, installs requirements.lock and refspec into it, has \`refspec doctor\` say what this
machine can run, then runs \`refspec demo\`: prompts decoded plainly and with EAGLE, on the weights shipped here.

  --no-serve   do not serve the site afterwards (it is not part of this version yet: nothing is served either way)
  PYTHON=...   in the environment: the Python to make .venv with, 3.11 or newer; else one is looked for"

here=$(readlink -f -- "${BASH_SOURCE[0]}") # start.sh itself, also when called through a symlink
root=$(dirname -- "$(dirname -- "$here")")
# shellcheck source=scripts/_venv.sh
. "$root/scripts/_venv.sh" "$root"

for option in "$@"; do
  case $option in
    --no-serve) ;;
    -h | --help) printf '%s\n' "$usage" && exit ;;
    *) die "unknown option $option (scripts/start.sh --help lists them)" ;;
  esac
done

prepare_venv
cd "$root"
say "refspec doctor"
"$venv/bin/refspec" doctor || die "refspec doctor found something in the way: see above"
say "refspec demo"
exec "$venv/bin/refspec" demo
