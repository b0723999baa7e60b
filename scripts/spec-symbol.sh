#!/usr/bin/env bash
# The life of one name in SGLang's folder of speculative decoding, from whatever clone of SGLang is at hand.
set -euo pipefail

here=${BASH_SOURCE[0]}
if [ -L "$here" ]; then here=$(readlink -f -- "$here"); fi
case $here in */*) ;; *) here=./$here ;; esac
# shellcheck source=scripts/_history.sh
. "${here%/*}/_history.sh"

usage_en="usage: scripts/spec-symbol.sh [--lang zh|en] NAME [PATH]

Prints the life of a function, class or variable of the module in python/sglang/srt/speculative: each commit on the main
line (origin/main, else main, else master, else HEAD) that adds or removes a line with NAME in it, the oldest first, as
the author's day, the hash and the title, and below it what happened in which file:

  born     the first line that defines it: def NAME, class NAME, or NAME = at the margin
  also     one more definition, in another file or class          gone    one of several is no longer there
  moved    from one file to another; a renamed file counts        back    defined again
  changed  the line that defines it is another                    died    the last definition is gone
  named    lines added and removed that name it without defining it

A change inside a function that leaves all lines with its name alone is not seen here, nor is any other folder: what
moved in is born, what moved out died. PATH is a clone of SGLang (full, bare or shallow) or a folder in one; else the
current folder. Nothing is fetched and nothing is changed.

  --lang zh|en   the language; else Chinese where LC_ALL, LC_MESSAGES or LANG, whichever is set first, starts with zh

exit status: 0 its whole life was printed, 1 the clone lacks some of it or all, 2 there is no clone to look at"
usage_zh='用法：scripts/spec-symbol.sh [--lang zh|en] 名字 [路径]

列出一个函数、类或模块级变量在 python/sglang/srt/speculative 中的一生：主线（origin/main，其次 main、master、HEAD）上
每个增删了含该名字的行的提交，从旧到新，先是作者日期、哈希和标题，其下是哪个文件里发生了什么：

  出生   第一次出现定义它的行：def 名字、class 名字，或行首的 名字 =
  另有   别的文件或类里又多了一个定义                  减少   几个定义中少了一个
  移动   从一个文件移到另一个；文件改名也算            恢复   重新定义
  改动   定义它的那一行变了                            消亡   最后一个定义消失
  提及   增加和删除的、提到而不定义它的行数

函数内部的改动，若没有碰到含其名字的行，这里看不到；别的目录也不看：移入算出生，移出算消亡。路径是 SGLang 的一个克隆
（完整、裸或浅克隆均可）或其中的目录；省略时为当前目录。不联网，不改动任何东西。

  --lang zh|en   语言；省略时，若 LC_ALL、LC_MESSAGES、LANG 中第一个已设置的以 zh 开头，则用中文

退出码：0 一生全部列出，1 克隆缺少其中一些或全部，2 没有可查看的克隆'
takes_name=1
open_clone "$usage_en" "$usage_zh" "$@"
find_main

# \b would do for some systems' regular expressions only.
before='(^|[^[:alnum:]_])' behind='([^[:alnum:]_]|$)'
named=$before$name$behind
longest=2000 # bytes
defines="^[+-]([[:space:]]*(async[[:space:]]+)?(def|class)[[:space:]]+$name$behind|${name}[[:space:]]*(:[^=]+)?=([^=]|\$))"

# Plumbing, which heeds few settings. Without renames: of a file with another name, all lines are gone and come.
read_patches() {
  git_here rev-list --reverse "$tip" -- ":/$folder" |
    git_here -c core.quotePath=false diff-tree --stdin --root -r -p -U0 --no-renames --text --no-color --no-ext-diff \
      --no-textconv --no-prefix --indent-heuristic --diff-algorithm=default -G "$named" --date=short --abbrev=10 \
      --encoding=UTF-8 --format='=%H %ad  %h  %s' -- ":/$folder"
}

# What a commit did, one entry for each file with a line that names NAME: the lines that define it, and the others.
files=() gained=() lost=() new=() old=() more=() fewer=() n_files=0
# Where it is defined so far, and how often.
homes=() times=() n_homes=0 alive=0 ever=""

# of_file NAME: sets at to its entry in files, a new one if there is none.
of_file() {
  at=$((n_files - 1))
  if [ "$at" -lt 0 ] || [ "${files[at]}" != "$1" ]; then
    at=$n_files n_files=$((n_files + 1))
    files[at]=$1 gained[at]=0 lost[at]=0 new[at]="" old[at]="" more[at]=0 fewer[at]=0
  fi
}

# take_line LINE FILE: counts a line of a patch. An expression takes bash minutes in a line of megabytes, so of such a
# line the beginning has to do; whether it has NAME at all, a pattern finds out.
take_line() {
  if [ "${#1}" -gt "$longest" ]; then
    case $1 in *[!A-Za-z0-9_]"$name"[!A-Za-z0-9_]* | *[!A-Za-z0-9_]"$name") ;; *) return 0 ;; esac
    set -- "${1:0:longest}" "$2"
  else
    [[ $1 =~ $named ]] || return 0
  fi
  of_file "$2"
  local text=${1#?}
  text=${text#"${text%%[![:space:]]*}"}
  text=${text%$'\r'}
  if [[ $1 =~ $defines ]]; then
    case $1 in
      +*) gained[at]=$((gained[at] + 1)) new[at]=${new[at]}$text$'\n' ;;
      *) lost[at]=$((lost[at] + 1)) old[at]=${old[at]}$text$'\n' ;;
    esac
  else
    case $1 in +*) more[at]=$((more[at] + 1)) ;; *) fewer[at]=$((fewer[at] + 1)) ;; esac
  fi
}

# settle FILE NUMBER: so many definitions more (or, below zero, fewer) are in that file.
settle() {
  local i
  for ((i = 0; i < n_homes; i++)); do [ "${homes[i]}" != "$1" ] || break; done
  if [ "$i" -eq "$n_homes" ]; then homes[i]=$1 times[i]=0 n_homes=$((n_homes + 1)); fi
  times[i]=$((times[i] + $2)) alive=$((alive + $2))
}

# event EN ZH FILE TEXT: one line below a commit.
event() {
  local said
  if [ "$lang" = zh ]; then said="$2$3${4:+：$4}"; else said="$1${3:+ $3}${4:+: $4}"; fi
  disarm "  $said"
  emit "$harmless"
}

# Sets line to the first of the lines in $1, and says how many more there are.
first_line() {
  local rest=${1#*$'\n'} count=0
  line=${1%%$'\n'*}
  while [ -n "$rest" ]; do rest=${rest#*$'\n'} count=$((count + 1)); done
  if [ "$count" -gt 0 ]; then line="$line (+$count)"; fi
}

# Prints the commit whose lines have been taken, and forgets it.
tell_commit() {
  local i line from="" to="" sources=0 targets=0 mentions="" was=$alive
  [ "$n_files" -gt 0 ] || return 0
  disarm "$title"
  emit "$(cut_to 96 "$harmless")"
  for ((i = 0; i < n_files; i++)); do
    if [ "${gained[i]}" -gt "${lost[i]}" ]; then targets=$((targets + 1)) to=$i; fi
    if [ "${gained[i]}" -lt "${lost[i]}" ]; then sources=$((sources + 1)) from=$i; fi
    if [ "${gained[i]}" -ne "${lost[i]}" ]; then settle "${files[i]}" $((gained[i] - lost[i])); fi
  done
  if is_boundary "$hash"; then # git shows it as if it had brought all that there is
    event "the history of this clone begins here" "这个克隆的历史从这里开始" "" ""
  fi
  if [ "$sources$targets" = 11 ] && [ $((gained[to] - lost[to])) -eq $((lost[from] - gained[from])) ]; then
    first_line "${new[to]}"
    event "moved from ${files[from]} to" "移动：从 ${files[from]} 到 " "${files[to]}" "$line"
    sources=0 targets=0
  fi
  for ((i = 0; i < n_files; i++)); do
    if [ "${more[i]}" -gt 0 ] || [ "${fewer[i]}" -gt 0 ]; then
      mentions="$mentions, ${files[i]}"
      if [ "${more[i]}" -gt 0 ]; then mentions="$mentions +${more[i]}"; fi
      if [ "${fewer[i]}" -gt 0 ]; then mentions="$mentions -${fewer[i]}"; fi
    fi
    first_line "${new[i]}"
    if [ "${gained[i]}" -gt "${lost[i]}" ] && [ "$targets" -gt 0 ]; then
      if is_boundary "$hash"; then
        event "defined in" "已有定义：" "${files[i]}" "$line"
      elif [ -z "$ever" ]; then
        event "born in" "出生：" "${files[i]}" "$line"
      elif [ "$was" -eq 0 ]; then
        event "back in" "恢复：" "${files[i]}" "$line"
      else
        event "also in" "另有：" "${files[i]}" "$line"
      fi
      ever=1 was=1
    elif [ "${gained[i]}" -lt "${lost[i]}" ] && [ "$sources" -gt 0 ]; then
      if [ "$alive" -eq 0 ]; then
        event "died in" "消亡：" "${files[i]}" ""
      else
        event "gone from" "减少：" "${files[i]}" ""
      fi
    elif [ "${gained[i]}" -gt 0 ] && [ "${gained[i]}" -eq "${lost[i]}" ]; then
      if [ "${new[i]}" = "${old[i]}" ]; then
        event "moved within" "移动：在同一文件中，" "${files[i]}" ""
      else
        event "changed in" "改动：" "${files[i]}" "$line"
      fi
    fi
  done
  if [ -n "$mentions" ] && ! is_boundary "$hash"; then event "named in" "提及：" "${mentions#, }" ""; fi
  n_files=0 printed=1
}

printed="" broken="" header="" hash="" title="" file=""
while IFS= read -r line; do
  case $line in
    =failed) broken=1 ;;
    =*)
      tell_commit
      hash=${line%% *} title=${line#* }
      hash=${hash#=}
      ;;
    "diff --git "*) header=1 ;;
    @@*) header="" ;;
    *)
      if [ -z "$header" ]; then
        case $line in [+-]*"$name"*) take_line "$line" "$file" ;; esac
      else
        case $line in
          *" /dev/null") ;;
          "--- "* | "+++ "*)
            file=${line#????}
            file=${file%$'\t'} # git puts it behind a name with a space in it
            file=${file/"$folder/"/}
            ;;
        esac
      fi
      ;;
  esac
done < <(read_patches 2>/dev/null || failed)

if [ -n "$broken" ]; then
  lacks_for read_patches "contents of files" "文件内容"
  finish
fi
tell_commit
if [ -z "$printed" ]; then
  lacks "no line of $folder on $main ever named $name" "$main 上的 $folder 里从未有过提到 $name 的行"
  finish
fi
where=""
for ((i = 0; i < n_homes; i++)); do
  if [ "${times[i]}" -gt 0 ]; then where="$where, ${homes[i]}"; fi
  if [ "${times[i]}" -gt 1 ]; then where="$where (${times[i]})"; fi
done
disarm "${where#, }"
where=$harmless
at_tip="$main (${tip:0:10})"
if [ -n "$where" ]; then
  emit_told "At $at_tip it is defined in $where" "在 $at_tip 上，它定义在 $where"
elif [ -n "$ever" ]; then
  emit_told "At $at_tip no definition is left in $folder" "在 $at_tip 上，$folder 里已没有它的定义"
else
  emit_told "Up to $at_tip it was never defined in $folder" "直到 $at_tip，$folder 里从未定义过它"
fi
if [ "$shallow" = true ]; then
  lacks "what came before the oldest commit of this clone is not known" "这个克隆中最旧的提交之前发生过什么，无从得知"
fi
finish
