#!/usr/bin/env bash
# The twelve commits that brought EAGLE into SGLang, from whatever clone of SGLang is at hand.
set -euo pipefail

here=${BASH_SOURCE[0]}
if [ -L "$here" ]; then here=$(readlink -f -- "$here"); fi
case $here in */*) ;; *) here=./$here ;; esac
# shellcheck source=scripts/_history.sh
. "${here%/*}/_history.sh"

usage_en="usage: scripts/eagle-commits.sh [--lang zh|en] [PATH]

Prints the twelve commits that brought EAGLE into SGLang, each as the author's day, the hash and the title, cut at 96
characters. PATH is a clone of SGLang (full, bare, blobless or shallow) or a folder in one; else the current folder.
Nothing is fetched and nothing is changed. A commit that the clone lacks is named on stderr.

  --lang zh|en   the language of messages; else Chinese where LC_ALL, LC_MESSAGES or LANG, whichever is set first,
                 starts with zh

exit status: 0 all were printed, 1 the clone lacks some, 2 there is no clone to look at"
usage_zh='用法：scripts/eagle-commits.sh [--lang zh|en] [路径]

列出把 EAGLE 带进 SGLang 的十二个提交，每行是作者日期、哈希和标题，截到 96 个字符。路径是 SGLang 的一个克隆
（完整、裸、无 blob 或浅克隆均可）或其中的目录；省略时为当前目录。不联网，不改动任何东西。克隆中没有的提交会在
stderr 上指出。

  --lang zh|en   消息的语言；省略时，若 LC_ALL、LC_MESSAGES、LANG 中第一个已设置的以 zh 开头，则用中文

退出码：0 全部列出，1 克隆缺少其中一些，2 没有可查看的克隆'
open_clone "$usage_en" "$usage_zh" "$@"

# Whole hashes: ten digits may come to mean two objects in some clone.
commits="
  9c05c6898e262b1f7dd07b1401918be2d48fe4e2
  b0524c3789725642c3dd93323d47b18b9ba77a51
  ad20b7957e26f14a91e3052a13b822b8744bd931
  815dce0554793d0788faf4eaacf0c7271c070e95
  8c8779cd059d64827f148c9532645c641512a04d
  013021b6a1c3a95fb9569ff730d047c960c78380
  f9905d59a8f864ce7457a880850fb5fa6397f6b9
  862dd76c76191b0d19b97cffa8d51c6cc3a466eb
  9fafa62db7d489f1b7910174373183cee9e65c3d
  9fb48f951f8620d4ad255a2abb2b2aa779ab9d9a
  e983e43248202f96177ff4c4897fb8dc8dabe71f
  b26bc86b36b89cee813ab1de89dec8e819f04687
"
for commit in $commits; do
  # rev-list and not log: it heeds no setting, and needs no more than the commit. Before the line it prints the hash.
  if line=$(git_here rev-list --no-walk --date=short --abbrev=10 --encoding=UTF-8 --format='%ad  %h  %s' \
    "$commit" -- 2>/dev/null); then
    emit "$(cut_to 96 "${line#*$'\n'}")"
  else
    lacks "this clone lacks the commit ${commit:0:10}" "这个克隆里没有提交 ${commit:0:10}"
  fi
done
finish
