"""``uvcc completion SHELL``: verbs, options, values, runs and profiles at the Tab key of bash, zsh and fish."""

from __future__ import annotations

import argparse
from typing import Final

from uvcc_console.cli import common

_BASH: Final = """\
_uvcc() {
    local word="${COMP_WORDS[COMP_CWORD]}" found line files=
    COMPREPLY=()
    while IFS= read -r line; do
        if [ "$line" = ":files" ]; then files=1; elif [ -n "$line" ]; then COMPREPLY+=("${line%%$'\\t'*}"); fi
    done < <(uvcc completion --at "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [ -n "$files" ]; then
        while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$word")
        compopt -o filenames 2>/dev/null
    fi
    if [ "$word" = "=" ] || [ "${COMP_WORDS[COMP_CWORD-1]}" = "=" ]; then  # what stands before the sign is kept
        COMPREPLY=("${COMPREPLY[@]#*=}")
    fi
    case "${COMPREPLY[0]-}" in *=) compopt -o nospace 2>/dev/null ;; esac
    if [ -z "$files" ]; then  # with files the shell quotes by itself
        for line in "${!COMPREPLY[@]}"; do printf -v 'COMPREPLY[line]' %q "${COMPREPLY[line]}"; done
    fi
}
complete -F _uvcc uvcc"""
_ZSH: Final = """\
#compdef uvcc
_uvcc() {
    local -a found
    local line files=
    while IFS= read -r line; do
        if [[ $line == ":files" ]]; then
            files=1
        elif [[ -n $line ]]; then
            found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        fi
    done < <(uvcc completion --at "${(@)words[2,CURRENT]}" 2>/dev/null)
    (( $#found )) && _describe 'uvcc' found
    if [[ -n $files ]]; then _files; fi
}
compdef _uvcc uvcc"""
_FISH: Final = """\
function __uvcc
    set -l words (commandline -opc)[2..-1] (commandline -ct)
    for line in (uvcc completion --at $words 2>/dev/null)
        if test "$line" = ":files"
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c uvcc -f -a "(__uvcc)\""""
_SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(shell: str) -> str:
    """What the shell is to read once. It asks this program at every Tab."""
    return _SCRIPTS[shell]


def run(argv: list[str]) -> int:
    about = (
        'A script for your shell: eval "$(uvcc completion bash)", or the same with zsh; for fish: '
        "uvcc completion fish | source. Whatever verbs, options and values there are is offered."
    )
    parser = common.Parser("completion", about)
    parser.add_argument("shell", nargs="?", choices=[*_SCRIPTS], default="bash")
    parser.add_argument(
        "--at",
        nargs=argparse.REMAINDER,
        metavar="WORD",
        help="what may stand in place of the last word, as scripts ask",
    )
    args = parser.parse_args(argv)
    if args.at is None:
        common.hand_out(script(args.shell))
        return 0
    from uvcc_console.cli.machine.candidates import candidates

    for found in candidates(args.at):
        common.hand_out(found.word if not found.does else f"{found.word}\t{found.does}")
    return 0
