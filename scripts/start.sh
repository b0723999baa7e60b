#!/usr/bin/env bash
# From a fresh clone to a look at what refspec does and to the course, in one command.
set -euo pipefail

usage="usage: scripts/start.sh [--no-serve]

Makes .venv in the repository, installs requirements.lock and refspec into it, has \`refspec doctor\` say what this
machine can run, then runs \`refspec demo\`: prompts decoded plainly and with EAGLE, on the weights shipped here. At the
end it builds the course's site and serves it on 127.0.0.1, port 8000 or the next that is free, until Ctrl-C.

  --no-serve   build the site (into site/), but do not serve it
  PYTHON=...   in the environment: the Python to make .venv with, 3.11 or newer; else one is looked for"

here=$(readlink -f -- "${BASH_SOURCE[0]}") # start.sh itself, also when called through a symlink
root=$(dirname -- "$(dirname -- "$here")")
# shellcheck source=scripts/_venv.sh
. "$root/scripts/_venv.sh" "$root"

# Prints the first port from 8000 on that one can listen on, or nothing.
free_port() {
  "$venv/bin/python" -c '
import socket
for port in range(8000, 8100):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            continue
    print(port)
    break
'
}

serve=yes
for option in "$@"; do
  case $option in
    --no-serve) serve=no ;;
    -h | --help) printf '%s\n' "$usage" && exit ;;
    *) die "unknown option $option (scripts/start.sh --help lists them)" ;;
  esac
done

prepare_venv
cd "$root"
say "refspec doctor"
"$venv/bin/refspec" doctor || die "refspec doctor found something in the way: see above"
say "refspec demo"
"$venv/bin/refspec" demo || die "refspec demo has failed: see above"
say "refspec site build (half a minute, the first time)"
"$venv/bin/refspec" site build || die "refspec site build has failed: see above"
if [ $serve = no ]; then
  say "done; to read the course: . .venv/bin/activate && refspec site serve"
  exit
fi

port=$(free_port)
[ -n "$port" ] || die "ports 8000 to 8099 are taken; choose one: . .venv/bin/activate && refspec site serve --port PORT"
[ "$port" = 8000 ] || say "port 8000 is taken: taking $port"
say "refspec site serve --port $port"
say "next, in another terminal: . .venv/bin/activate && refspec start 01"
exec "$venv/bin/refspec" site serve --port "$port"
