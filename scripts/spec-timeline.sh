#!/usr/bin/env bash
# How many commits a month SGLang's folder of speculative decoding got, from whatever clone of SGLang is at hand.
set -euo pipefail

here=${BASH_SOURCE[0]}
if [ -L "$here" ]; then here=$(readlink -f -- "$here"); fi
case $here in */*) ;; *) here=./$here ;; esac
# shellcheck source=scripts/_history.sh
. "${here%/*}/_history.sh"

usage_en="usage: scripts/spec-timeline.sh [--lang zh|en] [PATH]

Counts the commits that touch python/sglang/srt/speculative, month by month (the author's), on the main line:
origin/main, else main, else master, else HEAD. PATH is a clone of SGLang (full, bare, blobless or shallow) or a folder
in one; else the current folder. Nothing is fetched and nothing is changed.

  --lang zh|en   the language; else Chinese where LC_ALL, LC_MESSAGES or LANG, whichever is set first, starts with zh

exit status: 0 all were counted, 1 the clone lacks some, 2 there is no clone to look at"
usage_zh='用法：scripts/spec-timeline.sh [--lang zh|en] [路径]

按月（作者日期）统计主线上改动 python/sglang/srt/speculative 的提交；主线取 origin/main，其次 main、master、HEAD。
路径是 SGLang 的一个克隆（完整、裸、无 blob 或浅克隆均可）或其中的目录；省略时为当前目录。不联网，不改动任何东西。

  --lang zh|en   语言；省略时，若 LC_ALL、LC_MESSAGES、LANG 中第一个已设置的以 zh 开头，则用中文

退出码：0 全部统计，1 克隆缺少其中一些，2 没有可查看的克隆'
open_clone "$usage_en" "$usage_zh" "$@"
find_main

widest=60   # characters of the longest bar
long_gap=24 # months without commits that are still printed one by one

# Sets said to a month, by its number.
say() { printf -v said '%04d-%02d' $(($1 / 12)) $(($1 % 12 + 1)); }

# rev-list and not log: it heeds no setting. Before each month it prints the hash.
read_months() { git_here rev-list --encoding=UTF-8 --date=format:%Y-%m --format=%ad "$tip" -- ":/$folder"; }

# Months are numbered through: twelve a year.
months=() first="" last=0 most=0 total=0 unknown=0 broken=""
while read -r word rest; do
  case $word in
    commit) hash=$rest ;;
    =failed) broken=1 ;;
    "") ;;
    *)
      # Git shows such a commit as if it had brought all that there is.
      if is_boundary "$hash"; then unknown=$((unknown + 1)) && continue; fi
      month=$((10#${word%-*} * 12 + 10#${word#*-} - 1))
      months[month]=$((${months[month]:-0} + 1)) total=$((total + 1))
      if [ -z "$first" ] || [ "$month" -lt "$first" ]; then first=$month; fi
      if [ "$month" -gt "$last" ]; then last=$month; fi
      if [ "${months[month]}" -gt "$most" ]; then most=${months[month]}; fi
      ;;
  esac
done < <(read_months 2>/dev/null || failed)

if [ -n "$broken" ]; then
  lacks_for read_months "lists of files" "文件列表"
  finish
fi
if [ "$total" -eq 0 ] && [ "$unknown" -eq 0 ]; then
  lacks "no commit on $main touches $folder" "$main 上没有改动 $folder 的提交"
  finish
fi
emit_told "$folder on $main (${tip:0:10}), commits per month" "$folder，$main（${tip:0:10}）上每月的提交数"
if [ "$most" -lt "$widest" ]; then widest=$most; fi
printf -v bar '%*s' "$widest" ""
bar=${bar// /#}
for ((month = ${first:-1}; month <= last; month++)); do
  number=${months[month]:-0}
  until=$month
  while [ -z "${months[until]:-}" ]; do until=$((until + 1)); done # the last month is not empty
  gap=$((until - month))
  if [ "$gap" -gt "$long_gap" ]; then
    say "$month" && line=$said
    say $((until - 1))
    emit_told "$line to $said: no commit in $gap months" "$line 至 ${said}：$gap 个月没有提交"
    month=$((until - 1))
    continue
  fi
  length=0
  if [ "$number" -gt 0 ]; then length=$(((number * widest + most - 1) / most)); fi
  printf -v line '%04d-%02d  %4d  %s' $((month / 12)) $((month % 12 + 1)) "$number" "${bar:0:length}"
  while [ "$line" != "${line% }" ]; do line=${line% }; done
  emit "$line"
done
printf -v total %4d "$total"
emit_told "total    $total" "合计     $total"
if [ "$shallow" = true ]; then
  lacks "the months before the oldest commit of this clone are not counted" "早于这个克隆中最旧提交的月份没有统计"
fi
finish
