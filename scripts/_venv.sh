# shellcheck shell=bash
# What start.sh and test.sh share: prepare_venv sees to it that .venv holds requirements.lock and refspec itself.
#
#   .venv is                                          so prepare_venv
#   absent, or an empty folder                        makes it
#   ours, whole, installed from these very files      leaves it alone (well under a second)
#   ours, whole, installed from older ones            installs again into it
#   ours, but broken, half made or moved              deletes it and makes it again
#   another's virtual environment, and it works       installs into it, and never deletes it
#   another's virtual environment, broken             moves it aside and makes ours
#   anything else                                     refuses: that may be somebody's data
#
# Plain bash 3.2, which macOS still has. The caller has set -euo pipefail, and passes the path of the repository.

root=$1
me=$(basename -- "$0")
venv=$root/.venv
made=$venv/.made-by-refspec # present: this script made .venv, for the repository at the path that it holds
busy=$venv/.unpacking       # present: files were on their way into .venv when something stopped that
stamp=$venv/.installed-from # what was installed last: a copy of the files that say so
log=$venv/install.log
needed_mb=2500              # enough with torch for the CPU; torch for CUDA takes several GB more

say() { printf '%s: %s\n' "$me" "$*"; }
die() {
  printf '%s: error: %s\n' "$me" "$*" >&2
  exit 1
}
trap 'printf "\n%s: stopped; to go on, run it again\n" "$me" >&2; exit 130' INT

prepare_venv() {
  find_python
  (: >>"$root/.venv.lock") 2>/dev/null || die "cannot write to $root: make it writable, or clone to another place"
  keep_caches_at_hand
  unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX # what another project needs there can only do harm here
  case ${LC_ALL:-} in C | POSIX) unset LC_ALL ;; esac # with it, Python 3.11 chokes on a path that is not all ASCII
  export PYTHONNOUSERSITE=1 PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

  exec 9>>"$root/.venv.lock"
  lock_or_wait
  if [ -f "$made" ]; then
    venv_is_whole || remake_venv
  elif [ -f "$venv/pyvenv.cfg" ]; then
    if venv_runs; then say "using the .venv that is here, though not made by this script"; else move_venv_aside; fi
  elif [ -e "$venv" ] || [ -L "$venv" ]; then
    rmdir -- "$venv" 2>/dev/null || die "$venv is not a virtual environment: move it away, then run this again"
  fi
  [ -d "$venv" ] || make_venv
  if ! { [ -f "$stamp" ] && installed_from | cmp -s - "$stamp"; }; then install; fi
  exec 9>&-
}

# Sets `python`: the first interpreter found that refspec and torch 2.13.0 support and that can make environments.
find_python() {
  local candidate version refused="" without_venv=""
  PATH=${PATH#"$venv/bin:"} # where our own .venv is active, look behind it: it may be the broken one
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    # A command may be there and yet not run: pyenv, for one, has a stand-in for every version it knows.
    if version=$("$candidate" --version 2>&1); then
      case $version in
        "Python 3.1"[1-4].*)
          if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            python=$candidate
            return
          fi
          without_venv=${without_venv:-$version}
          ;;
        *) refused="${refused:+$refused, }$candidate is $version" ;;
      esac
    fi
    if [ "$candidate" = "${PYTHON:-}" ]; then # who names one wants that one or none
      refused=${refused:-$PYTHON does not run}
      break
    fi
  done
  if [ -n "$without_venv" ]; then
    die "$without_venv lacks its venv module: install it (on Debian and Ubuntu: apt install python3-venv)"
  fi
  die "Python 3.11 to 3.14 is needed (${refused:-none found}); install one, or name it: PYTHON=/path/to/python3.12 $0"
}

# Many a tool keeps a cache or a configuration below HOME. Where HOME cannot be written to, give them a folder here.
keep_caches_at_hand() {
  local cache=$root/.cache
  if [ -d "${HOME:-}" ] && [ -w "$HOME" ]; then return; fi
  say "HOME is not a folder that can be written to: caches go to .cache in the repository"
  export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$cache}" PIP_CACHE_DIR="${PIP_CACHE_DIR:-$cache/pip}"
  export MPLCONFIGDIR="${MPLCONFIGDIR:-$cache/matplotlib}" TRITON_HOME="${TRITON_HOME:-$cache}"
}

# One at a time. The lock belongs to descriptor 9, so the system lets go of it however this script ends.
lock_or_wait() {
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null && return
  say "another start.sh or test.sh is at work on .venv: waiting for it"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null || say "no locks on this file system: going on"
}

venv_runs() { "$venv/bin/python" -c 'import sys, pip; assert sys.version_info >= (3, 11)' 2>/dev/null; }

# Was it made for this place, with the Python that is wanted, and without a break? Is every package still there?
venv_is_whole() {
  if ! venv_runs || [ -f "$busy" ] || [ "$(cat "$made")" != "$root" ]; then return 1; fi
  if [ -n "${PYTHON:-}" ] && [ "$("$venv/bin/python" --version)" != "$("$PYTHON" --version)" ]; then return 1; fi
  "$venv/bin/python" -c '
import pathlib, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
for record in site.glob("*.dist-info/RECORD"):
    for top in {line.split(",")[0].split("/")[0] for line in record.read_text(encoding="utf-8").splitlines()}:
        assert (site / top).exists() or top == "__pycache__", top
' 2>/dev/null
}

remake_venv() {
  say "the .venv that is here is broken, half made, or made for another Python or place: making it again"
  rm -rf -- "$venv" || die "cannot delete $venv (made by another user?): delete it, then run this again"
}

move_venv_aside() {
  local aside=$venv.old number=1
  while [ -e "$aside" ]; do
    number=$((number + 1))
    aside=$venv.old$number
  done
  say "the .venv that is here is broken, and not made by this script: moving it to $(basename -- "$aside")"
  mv -- "$venv" "$aside" || die "cannot move $venv: move it away, then run this again"
}

make_venv() {
  local free
  free=$(free_mb "$root")
  if [ "${free:-$needed_mb}" -lt "$needed_mb" ]; then
    die "not enough disk space: .venv takes $needed_mb MB, $root has $free MB free; make room, then run this again"
  fi
  say "making .venv with $("$python" --version)"
  { mkdir -- "$venv" && printf '%s\n' "$root" >"$made" && : >"$busy"; } || die "cannot make $venv: see above"
  "$python" -m venv "$venv" >"$log" 2>&1 || die "$(why_it_failed "$python -m venv")"
  rm -f -- "$busy"
}

install() {
  say "installing requirements.lock into .venv (minutes, the first time; pip's full report: .venv/install.log)"
  rm -f -- "$stamp"
  : >"$log"
  pip_install -r requirements.lock
  # The lock holds what refspec needs and what builds it, so there is nothing left to look for or to download.
  pip_install --no-deps --no-build-isolation -e .
  installed_from >"$stamp"
  say "installed"
}

installed_from() {
  "$venv/bin/python" --version
  cat "$root/pyproject.toml" "$root/requirements.lock" "$root/requirements-cuda.lock"
}

pip_install() {
  (cd "$root" && "$venv/bin/python" -m pip install --no-input --progress-bar off "$@" </dev/null 2>&1) | follow_pip ||
    die "$(why_it_failed "pip install $*")"
  rm -f -- "$busy"
}

# All of pip's words go to the log; the terminal gets what takes long.
follow_pip() {
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log" || true
    case $line in
      *Downloading*MB\)) say "  ${line#"${line%%[! ]*}"}" ;;
      "Installing collected packages"*) : >"$busy" && say "  unpacking" ;;
    esac
  done 2>/dev/null
}

# Makes one line of a long log: $1 has failed.
why_it_failed() {
  local free free_tmp
  free=$(free_mb "$root")
  free_tmp=$(free_mb "${TMPDIR:-/tmp}")
  if grep -qE 'No space left|quota exceeded' "$log" || [ "${free:-50}" -lt 50 ] || [ "${free_tmp:-50}" -lt 50 ]; then
    echo "no disk space left ($root: $free MB, ${TMPDIR:-/tmp}: $free_tmp MB); make room, then run this again"
  elif grep -qE 'connection broken|Could not fetch URL|Read timed out|Name or service not known' "$log"; then
    echo "no network: pip cannot reach its package index; check the connection, then run this again (report: $log)"
  else
    echo "$1 failed: $(grep -E '^ERROR|[Ee]rror:' "$log" | tail -n 1) (report: $log)"
  fi
}

# Prints the MB that are free where $1 lies; nothing where df does not tell. Names with spaces shift df's columns, so:
# the number before the percentage.
free_mb() {
  df -Pk -- "$1" 2>/dev/null |
    awk 'NR == 2 && match($0, / [0-9]+ +[0-9]+%/) { print int(substr($0, RSTART) / 1024) }' || true
}
