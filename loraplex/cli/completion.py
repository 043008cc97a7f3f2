"""`completion`: a shell script that is generated from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from loraplex.cli.parsing import Commands, Parser

_ZSH_PRELUDE = "autoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
_{name}() {{
  local path={name} word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$path $word" in
      {inner}) path="$path $word" ;;
    esac
  done
  local words=
  case "$path" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _{name} {name}
"""


def add(commands: Commands, name: str, make_parser: Callable[[], Parser]) -> None:
    """Add the command to the program `name`."""

    async def run(args: argparse.Namespace) -> None:
        prelude = _ZSH_PRELUDE if args.shell == "zsh" else ""
        print(prelude + script(name, make_parser()), end="")

    parser = commands.add(
        "completion",
        run,
        "Print a completion script for the shell.",
        f'eval "$({name} completion bash)"',
        server="",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))


def script(name: str, parser: argparse.ArgumentParser) -> str:
    """The script for a program whose sub-commands and flags are those of `parser`."""
    words = _words(name, parser)
    inner = "|".join(f'"{path}"' for path in words if path != name)
    cases = "\n".join(
        f'    "{path}") words="{" ".join(known)}" ;;' for path, known in words.items()
    )
    return _SCRIPT.format(name=name, inner=inner, cases=cases)


def _words(path: str, parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The sub-commands and long flags that may follow each command, by the words that precede."""
    found: dict[str, list[str]] = {path: []}
    for action in parser._actions:
        found[path] += [flag for flag in action.option_strings if flag.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                found[path].append(name)
                found.update(_words(f"{path} {name}", child))
    return found
