"""`rlt completion bash|zsh`: a script that completes verbs, options, configs and values.

The script holds every name itself, so that a key press starts no Python:

    eval "$(rlt completion bash)"     in ~/.bashrc
    eval "$(rlt completion zsh)"      in ~/.zshrc, after compinit
"""

from __future__ import annotations

import shlex

from rlt_lightning.cli.help import VERBS, list_options
from rlt_lightning.run.shipped import list_shipped_configs
from rlt_lightning.types import InputError

BASH = """_rlt() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  # Bash takes --a=b as three words.
  [[ $word == "=" ]] && before="$before=" word=""
  [[ $before == "=" ]] && before="${{COMP_WORDS[COMP_CWORD-2]}}"
  before="${{before%=}}"
  if ((COMP_CWORD == 1)); then
    words={verbs}
  else
    case "$before" in
{values}
    esac
    if [[ -z $words && $word == -* ]]; then
      case "${{COMP_WORDS[1]}}" in
{options}
      esac
    fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case "$before" in -c|--config) ;; *) [[ -n $words ]] && return ;; esac
  compopt -o filenames 2>/dev/null
  COMPREPLY+=($(compgen -f -- "$word"))
}}
complete -F _rlt rlt
"""

ZSH = """#compdef rlt
_rlt() {{
  local before="${{words[CURRENT-1]}}" known=""
  if ((CURRENT == 2)); then
    local -a verbs=({verbs})
    _describe verb verbs
    return
  fi
  # --a=b: what follows the = is completed.
  if [[ $PREFIX == --*=* ]]; then before="${{PREFIX%%=*}}"; compset -P '*='; fi
  case "$before" in
{values}
  esac
  if [[ -z $known && $PREFIX == -* ]]; then
    case "${{words[2]}}" in
{options}
    esac
  fi
  [[ -n $known ]] && compadd -- ${{=known}}
  case "$before" in -c|--config) _files ;; *) [[ -z $known ]] && _files ;; esac
}}
compdef _rlt rlt
"""


def print_completion(words: list[str]) -> None:
    """Print the script of a shell.

    Raises:
        InputError: If it is neither bash nor zsh.
    """
    if words not in (["bash"], ["zsh"]):
        raise InputError(f"rlt completion takes bash or zsh, but got {' '.join(words) or 'none'}.")
    print(write_script(words[0]), end="")


def write_script(shell: str) -> str:
    """Return the script of a shell, bash or zsh."""
    options = {verb: list_options(verb) for verb in VERBS}
    names = {
        verb: " ".join([*dict.fromkeys(f"--{option.name}" for option, _ in own), "--help", "--help-all"])
        for verb, own in options.items()
    }
    values: dict[str, list[str]] = {}
    for own in options.values():
        for option, _ in own:
            choices = [word for word in option.kind.split("|") if not word[:1].isupper()]
            if len(choices) > 1:
                values.setdefault(" ".join(choices), []).append(f"--{option.name}")
    variable = "words" if shell == "bash" else "known"
    cases = [f"    -c|--config) {variable}={shlex.quote(' '.join(list_shipped_configs()))} ;;"]
    cases += [
        f"    {'|'.join(dict.fromkeys(named))}) {variable}={shlex.quote(choices)} ;;"
        for choices, named in values.items()
    ]
    blocks = [f"        {verb}) {variable}={shlex.quote(known)} ;;" for verb, known in names.items()]
    verbs = " ".join(VERBS)
    described = " ".join(shlex.quote(f"{verb}:{VERBS[verb].line}") for verb in VERBS)
    parts = {"values": "\n".join(cases), "options": "\n".join(blocks)}
    if shell == "bash":
        return BASH.format(verbs=shlex.quote(verbs), **parts)
    return ZSH.format(verbs=described, **parts)
