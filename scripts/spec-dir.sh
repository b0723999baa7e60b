#!/usr/bin/env bash
# How SGLang's folder of speculative decoding grew, from whatever clone of SGLang is at hand.
set -euo pipefail

here=${BASH_SOURCE[0]}
if [ -L "$here" ]; then here=$(readlink -f -- "$here"); fi
case $here in */*) ;; *) here=./$here ;; esac
# shellcheck source=scripts/_history.sh
. "${here%/*}/_history.sh"

usage_en="usage: scripts/spec-dir.sh [--lang zh|en] [PATH]

Counts the Python files in python/sglang/srt/speculative, and those with worker in their names, at v0.4.6, at v0.5.0rc0
and at one more revision. PATH is a clone of SGLang (full, bare, blobless or shallow) or a folder in one; else the
current folder. Nothing is fetched and nothing is changed. A tag or commit that the clone lacks is named on stderr.

  --lang zh|en   the language; else Chinese where LC_ALL, LC_MESSAGES or LANG, whichever is set first, starts with zh
  REF=...        in the environment: the last revision, a commit, tag or branch (29f6d408c0 if not set)

exit status: 0 all were printed, 1 the clone lacks some, 2 there is no clone to look at"
usage_zh='用法：scripts/spec-dir.sh [--lang zh|en] [路径]

统计 python/sglang/srt/speculative 中的 Python 文件，以及名字带 worker 的文件：在 v0.4.6、v0.5.0rc0 和另外一个版本上。
路径是 SGLang 的一个克隆（完整、裸、无 blob 或浅克隆均可）或其中的目录；省略时为当前目录。不联网，不改动任何东西。
克隆中没有的标签或提交会在 stderr 上指出。

  --lang zh|en   语言；省略时，若 LC_ALL、LC_MESSAGES、LANG 中第一个已设置的以 zh 开头，则用中文
  REF=...        环境变量：最后一个版本，可以是提交、标签或分支（默认 29f6d408c0）

退出码：0 全部列出，1 克隆缺少其中一些，2 没有可查看的克隆'
open_clone "$usage_en" "$usage_zh" "$@"

# Reads names of files, each with a NUL behind it, and prints the line for the revision $1.
describe() {
  local name files=0 workers=0 names="" noun="files" their="their names"
  while IFS= read -r -d '' name; do
    name=${name##*/}
    case $name in *.py) files=$((files + 1)) ;; *) continue ;; esac
    case $name in *worker*) workers=$((workers + 1)) && names="$names ${name%.py}" ;; esac
  done
  if [ "$files" -eq 1 ]; then noun="file"; fi
  if [ "$workers" -eq 1 ]; then their="its name"; fi
  names=$(cut_to 120 "${names# }")
  printf '%-10s  %3d ' "$1" "$files"
  tell "$noun, $workers with worker in $their${names:+: $names}" "个文件：${workers} 个带 worker 的文件${names:+；$names}"
}

# show LABEL REVISION WHAT_EN WHAT_ZH: the line for a revision, or that the clone lacks what it is.
show() {
  local commit line
  if ! commit=$(git_here rev-parse --verify --quiet "$2^{commit}" 2>/dev/null); then
    lacks "this clone lacks $3" "这个克隆里没有$4"
  # --full-tree: in a folder of a work tree, git would count only what lies below it. -z: names as they are.
  elif ! line=$(git_here ls-tree -r -z --full-tree --name-only "$commit" -- python/sglang/srt/speculative 2>/dev/null |
    describe "$1"); then
    lacks "this clone has $1 but not the list of its files (was it made with --filter=tree:0?)" \
      "这个克隆里有 ${1}，但没有它的文件列表（是用 --filter=tree:0 克隆的吗？）"
    found=1
  else
    disarm "$line"
    emit "$harmless"
  fi
}

fetch_tags="git fetch --tags https://github.com/sgl-project/sglang"
for tag in v0.4.6 v0.5.0rc0; do
  show "$tag" "refs/tags/$tag" "the tag $tag ($fetch_tags brings it)" "标签 ${tag}（用 ${fetch_tags} 取回）"
done
ref=${REF:-29f6d408c0}
disarm "$ref"
case $ref in -*) die "REF is a revision, not $harmless" "REF 是一个版本，不能是 $harmless" ;; esac
show "$harmless" "$ref" "the commit $harmless (REF=... names another)" "提交 ${harmless}（可用 REF=... 指定别的版本）"
finish
