"""`meshmend completion`: prints the script with which a shell completes commands and options."""

import os
from typing import Annotated, Final

import typer

from meshmend.cli.options import JsonOption
from meshmend.errors import InputError

SHELLS: Final = ("bash", "zsh", "fish")
# The shell sets this variable when it asks for completions.
_VARIABLE: Final = f"_{'meshmend'.upper()}_COMPLETE"


def completion_command(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
    as_json: JsonOption = False,
) -> None:
    """Print a script with which your shell completes commands, options and their values.

    **Examples**

    - meshmend completion bash >> ~/.bashrc

    - meshmend completion zsh > "${fpath[1]}/_meshmend"

    - meshmend completion fish > ~/.config/fish/completions/meshmend.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    from meshmend.cli.console import print_json

    if shell not in SHELLS:
        raise InputError(f"completion needs one of {', '.join(SHELLS)}, but got {shell!r}")
    script = get_completion_script(prog_name="meshmend", complete_var=_VARIABLE, shell=shell)
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        print(script)


def prepare_completion() -> bool:
    """Make Typer answer a shell that asks for completions; return whether one asks."""
    if _VARIABLE not in os.environ:
        return False
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    return True
