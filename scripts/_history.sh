# shellcheck shell=bash
# What eagle-commits.sh and the spec-*.sh share. open_clone reads the arguments and finds the clone; git_here asks it what
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

# open_clone USAGE_EN USAGE_ZH ARGUMENT...: sets lang and clone, or ends the script. Where the script has set takes_name,
# the first argument that is no option is a NAME and goes to name; it stays unset if there is none.
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
        if [ -n "${takes_name:-}" ] && [ -z "${name+set}" ]; then
          name=$1
          shift
          continue
        fi
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
  if [ -n "${takes_name:-}" ]; then check_name; fi
  command -v git >/dev/null || die "git is needed: install it, then run this again" "需要 git：请先安装"
  [ -d "$clone" ] || die "no such folder: $clone" "没有这个目录：$clone"
  keep_git_here
  git_dir=$(git_here rev-parse --absolute-git-dir 2>/dev/null) || die_of_git
}

check_name() {
  [ -n "${name+set}" ] || die "a NAME is needed, such as EAGLEWorker ($me --help says more)" \
    "需要一个名字，例如 EAGLEWorker（$me --help 有说明）"
  case $name in "" | [0-9]* | *[!A-Za-z0-9_]*) die "NAME is one name in Python, such as EAGLEWorker, not '$name'" \
    "名字应是单个 Python 标识符，例如 EAGLEWorker，而不是 '$name'" ;; esac
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

# shellcheck disable=SC2034 # for the scripts
folder=python/sglang/srt/speculative

# Finds the line of history to walk: upstream's main line, and in a fork HEAD may be another branch. Sets main (its
# name), tip (its last commit), shallow (true or false) and boundary (hashes of commits whose parents are not there),
# or ends the script.
find_main() {
  local lines kind hash file i=0
  lines=(origin/main main master HEAD)
  # Where one of these is set, a path cannot begin with :/, which means the root of the work tree.
  unset GIT_LITERAL_PATHSPECS GIT_GLOB_PATHSPECS GIT_NOGLOB_PATHSPECS GIT_ICASE_PATHSPECS
  tip=""
  while read -r kind hash; do
    if [ "$kind" = commit ]; then
      # shellcheck disable=SC2034 # for the scripts
      main=${lines[i]} tip=$hash
      break
    fi
    i=$((i + 1))
  done < <(printf '%s^{commit}\n' refs/remotes/origin/main refs/heads/main refs/heads/master HEAD |
    git_here cat-file --batch-check='%(objecttype) %(objectname)' 2>/dev/null)
  if [ -z "$tip" ]; then
    lacks "there is no commit in this clone" "这个克隆里没有任何提交"
    finish
  fi
  { read -r shallow && read -r file; } < <(git_here rev-parse --is-shallow-repository --git-path shallow)
  boundary=""
  if [ "$shallow" = true ]; then
    case $file in /*) ;; *) file=$clone/$file ;; esac
    boundary=$(<"$file")
  fi
}

is_boundary() { case $boundary in *"$1"*) ;; *) return 1 ;; esac }

# Goes behind what a command of git's printed, if it failed: bash 3.2 does not tell how a process substitution ended.
failed() { printf '\n=failed\n'; }

# lacks_for COMMAND WHAT_EN WHAT_ZH: says why the command failed, which reads WHAT.
lacks_for() {
  local complaint filter
  complaint=$("$1" 2>&1 >/dev/null) || true
  filter=$(git_here config --get-regexp '^remote\..*\.partialclonefilter$' 2>/dev/null) || true
  # A partial clone says that it could not fetch; which words it has for that depends on git's version.
  case ${filter:+$complaint} in
    *promisor* | *"could not fetch"* | *"lazy fetching disabled"* | *"not allowed"* | *"missing blob"* | \
      *"missing tree"* | *"unable to read"*)
      filter=${filter%%$'\n'*}
      found=1 # whether it is one of SGLang cannot be seen
      lacks "this clone lacks $2: it was made with --filter=${filter#* }, and nothing is fetched here" \
        "这个克隆里没有$3：它是用 --filter=${filter#* } 克隆的，而这里不联网"
      ;;
    *) lacks "git cannot read $git_dir: ${complaint%%$'\n'*}" "git 无法读取 ${git_dir}：${complaint%%$'\n'*}" ;;
  esac
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

# Sets harmless to a text of others without what would do something to a terminal: control characters become '?'.
disarm() {
  harmless=${1//[$'\x01'-$'\x1f\x7f']/?}
  harmless=${harmless//$'\xc2'[$'\x80'-$'\x9f']/?}
}

# Prints $1, or $2 to who reads Chinese, as something that was asked for.
emit_told() { if [ "$lang" = zh ]; then emit "$2"; else emit "$1"; fi; }

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
