"""``uvcc completion SHELL``: verbs and run names at the Tab key of bash, zsh and fish."""

from __future__ import annotations

from uvcc_console.cli import common
from uvcc_console.cli.main import VERBS

_NO_RUN = (
    "demo",
    "rollout",
    "runs",
    "data",
    "domain",
    "docs",
    "doctor",
    "paths",
    "profiles",
    "bench",
    "config",
    "completion",
)
_BASH = """\
_uvcc() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    elif [[ " {with_run} " == *" ${{COMP_WORDS[1]}} "* ]] && [ "$COMP_CWORD" -eq 2 ]; then
        COMPREPLY=($(compgen -W "last current $(uvcc completion --runs 2>/dev/null)" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -F _uvcc uvcc"""
_ZSH = """\
#compdef uvcc
_uvcc() {{
    local -a verbs runs
    verbs=({described})
    if (( CURRENT == 2 )); then
        _describe 'verb' verbs
    elif (( CURRENT == 3 )) && [[ " {with_run} " == *" $words[2] "* ]]; then
        runs=(last current $(uvcc completion --runs 2>/dev/null))
        _describe 'run' runs
    else
        _files
    fi
}}
compdef _uvcc uvcc"""


def script(shell: str) -> str:
    """What the shell is to read once."""
    with_run = " ".join(v for v in VERBS if v not in _NO_RUN)
    if shell == "bash":
        return _BASH.format(verbs=" ".join(VERBS), with_run=with_run)
    if shell == "zsh":
        described = " ".join(_quoted(f"{verb}:{about}") for verb, (_, about) in VERBS.items())
        return _ZSH.format(described=described, with_run=with_run)
    lines = [
        f"complete -c uvcc -n __fish_use_subcommand -a {verb} -d {_quoted(about)}" for verb, (_, about) in VERBS.items()
    ]
    seen = f"__fish_seen_subcommand_from {with_run}"
    return "\n".join([*lines, f'complete -c uvcc -n "{seen}" -a "last current (uvcc completion --runs 2>/dev/null)"'])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def run(argv: list[str]) -> int:
    about = 'A script for your shell: eval "$(uvcc completion bash)", or the same with zsh; fish reads it too.'
    parser = common.Parser("completion", about)
    parser.add_argument("shell", nargs="?", choices=["bash", "zsh", "fish"], default="bash")
    parser.add_argument("--runs", action="store_true", help="only the names of the runs, as the script asks for them")
    args = parser.parse_args(argv)
    common.show("\n".join(d.name for d in reversed(common.run_dirs())) if args.runs else script(args.shell))
    return 0
