# shellcheck shell=bash
# What eagle-commits.sh and spec-dir.sh share. open_clone reads the arguments and finds the clone; git_here asks it what
# no setting of the user's, no locale and no network can change; emit, lacks and finish say what came of it.
#
# Plain bash 3.2, which macOS still has, and git: nothing else is run. The caller has set -euo pipefail.
#
# exit status   0: everything was printed   1: the clone lacks something   2: nothing could be looked at

me=${0##*/}
status=0
found="" # set once the clone turned out to hold something that was asked for

# Before LC_ALL changes, and before bash has to read Chinese, which it might take for another encoding in a locale such
# as zh_CN.GBK.
case ${LC_ALL:-${LC_MESSAGES:-${LANG:-}}} in zh*) lang=zh ;; *) lang=en ;; esac
export LC_ALL=C # a character is a byte to bash, and git reports in English

# Prints $1, or $2 to who reads Chinese.
tell() { if [ "$lang" = zh ]; then printf '%s\n' "$2"; else printf '%s\n' "$1"; fi; }

die() {
  tell "$me: error: $1" "${me}：错误：$2" >&2
  exit 2
}

# open_clone USAGE_EN USAGE_ZH ARGUMENT...: sets lang and clone, or ends the script.
open_clone() {
  local usage_en=$1 usage_zh=$2 help="" named="" no_options=""
  shift 2
  clone=.
  while [ $# -gt 0 ]; do
    case $no_options$1 in # behind --, the prefix keeps a path from looking like an option
      -h | --help) help=1 ;;
      --lang) choose_lang "${2:-}" && shift ;;
      --lang=*) choose_lang "${1#--lang=}" ;;
      --) no_options="path:" ;;
      -?*) die "unknown option $1 ($me --help lists them; a folder of that name is ./$1)" \
        "未知选项 ${1}（$me --help 列出全部选项；若是同名目录，请写作 ./${1}）" ;;
      *)
        [ -z "$named" ] || die "one PATH at most, not $clone and $1" "最多一个路径，而不是 ${clone} 和 $1"
        clone=$1
        named=1
        ;;
    esac
    shift
  done
  if [ -n "$help" ]; then
    tell "$usage_en" "$usage_zh"
    exit
  fi
  command -v git >/dev/null || die "git is needed: install it, then run this again" "需要 git：请先安装"
  [ -d "$clone" ] || die "no such folder: $clone" "没有这个目录：$clone"
  keep_git_here
  git_dir=$(git_here rev-parse --absolute-git-dir 2>/dev/null) || die_of_git
}

choose_lang() {
  case $1 in
    zh | en) lang=$1 ;;
    *) die "--lang takes zh or en, not '$1'" "--lang 只能是 zh 或 en，而不是 '$1'" ;;
  esac
}

# Some variables of git's point it to another repository than the one asked for. Those that hold settings (GIT_CONFIG_*)
# stay: safe.directory may be among them.
keep_git_here() {
  local name
  for name in $(git rev-parse --local-env-vars 2>/dev/null); do
    case $name in GIT_CONFIG*) ;; *) unset "$name" ;; esac
  done
  export GIT_NO_REPLACE_OBJECTS=1                     # the commit itself, whatever `git replace` put in its place
  export GIT_NO_LAZY_FETCH=1 GIT_ALLOW_PROTOCOL=none  # what a blobless clone lacks it lacks; older gits know the second
}

git_here() { git -C "$clone" "$@"; }

die_of_git() {
  local complaint remedy
  complaint=$(git_here rev-parse --absolute-git-dir 2>&1) || true
  case $complaint in
    *"git config --global --add safe.directory"*)
      remedy="git config --global ${complaint##*git config --global }"
      remedy=${remedy%%$'\n'*}
      die "git refuses $clone, which belongs to another user; if you trust it, run: $remedy" \
        "git 拒绝读取 ${clone}，因为它属于另一个用户；如果信任它，请运行：$remedy"
      ;;
    *"not a git repository"*) die "not a git repository: $clone (name a clone of SGLang)" \
      "不是 git 仓库：${clone}（请指定 SGLang 的一个克隆）" ;;
  esac
  die "git cannot read $clone: ${complaint%%$'\n'*}" "git 无法读取 ${clone}：${complaint%%$'\n'*}"
}

# Prints the first $1 characters of $2, a text in UTF-8; a byte that belongs to no character comes out as U+FFFD.
cut_to() {
  local room=$1 rest=$2 kept="" size
  while [ -n "$rest" ] && [ "$room" -gt 0 ]; do
    case $rest in
      [$'\x01'-$'\x7f']*) size=1 ;;
      [$'\xc2'-$'\xdf'][$'\x80'-$'\xbf']*) size=2 ;;
      [$'\xe0'-$'\xef'][$'\x80'-$'\xbf'][$'\x80'-$'\xbf']*) size=3 ;;
      [$'\xf0'-$'\xf4'][$'\x80'-$'\xbf'][$'\x80'-$'\xbf'][$'\x80'-$'\xbf']*) size=4 ;;
      *) size=0 ;;
    esac
    if [ "$size" -gt 0 ]; then
      kept=$kept${rest:0:size}
      rest=${rest:size}
    else
      kept=$kept$'\xef\xbf\xbd'
      rest=${rest:1}
    fi
    room=$((room - 1))
  done
  printf '%s\n' "$kept"
}

emit() {
  printf '%s\n' "$1" 2>/dev/null || die "cannot write to standard output" "无法写到标准输出"
  found=1
}

# Says that the clone lacks something, and goes on.
lacks() {
  tell "$me: $1" "${me}：$2" >&2
  status=1
}

finish() {
  if [ "$status" -eq 0 ]; then exit; fi
  if [ "$(git_here rev-parse --is-shallow-repository)" = true ]; then
    tell "$me: the clone is shallow: git fetch --unshallow brings the rest" \
      "${me}：这是浅克隆：用 git fetch --unshallow 取回其余历史" >&2
  elif [ -z "$found" ] && ! git_here rev-parse --verify --quiet HEAD:python/sglang >/dev/null 2>&1; then
    tell "$me: $git_dir does not look like a clone of SGLang: name the path of one" \
      "${me}：${git_dir} 不像是 SGLang 的克隆：请指定一个克隆的路径" >&2
  fi
  exit "$status"
}
