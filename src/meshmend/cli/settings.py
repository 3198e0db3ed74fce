"""The options of commands that read the settings of a job: made from the tree of `config.py`."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from meshmend.config import COMMANDS, LEAVES, PREFIX, Leaf, job_config
from meshmend.errors import InputError

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings in a TOML file; see docs/settings.md."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="GROUP.NAME=VALUE",
        help="Any setting, such as timing.link_timeout=5; repeat for more. An option counts more "
        f"than --set, then come --config, a {PREFIX}* variable, the default.",
    ),
]


def job_command(
    name: str, *, defaults: Mapping[str, Any] | None = None, needs: tuple[str, ...] = ()
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator that calls a command with the settings of its job as first argument.

    The settings that are options are listed in `config.COMMANDS`; the function has only the other
    options. `defaults` are those of this command; `needs` are keys that have no default.
    """
    own_defaults = defaults or {}
    key_of = {key.replace(".", "_"): key for key in COMMANDS[name].options}

    def decorate(body: Callable[..., int]) -> Callable[..., int]:
        def command(config: Path | None, assignments: list[str] | None, **given: Any) -> int:
            options = {key: given.pop(parameter) for parameter, key in key_of.items()}
            settings = job_config(
                {key: value for key, value in options.items() if value not in (None, [], False)},
                assignments=assignments or (),
                file=config,
                environment=os.environ,
                defaults=own_defaults,
                command=name,
            )
            for leaf in (LEAVES[key] for key in needs if not settings.get(key)):
                raise InputError(
                    f"meshmend {name} needs {leaf.option} {leaf.metavar}, or {leaf.key} in --config"
                )
            return body(settings, **given)

        _, *own = inspect.signature(body).parameters.values()
        of_tree = [
            _parameter(parameter, _annotation(LEAVES[key], own_defaults.get(key), key in needs))
            for parameter, key in key_of.items()
        ]
        last = [_parameter("config", ConfigOption), _parameter("assignments", SetOption)]
        parameters = [
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for each in (*filter(_is_argument, own), *of_tree, *last)
        ]
        parameters += [each for each in own if not _is_argument(each)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__doc__, command.__name__ = body.__doc__, body.__name__
        return command

    return decorate


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is no option, but an argument or the context."""
    known = getattr(parameter.annotation, "__metadata__", ())
    return not any(isinstance(each, typer.models.OptionInfo) for each in known)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    default = False if annotation.__origin__ is bool else None
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _annotation(leaf: Leaf, default: str | None, is_needed: bool) -> Any:
    """Return the type and the option of a setting, as Typer reads them."""
    shown = default or leaf.default_words
    is_plain = leaf.kind in (bool, tuple) or shown == "none"
    words = leaf.words if is_plain or is_needed else f"{leaf.words} Default: {shown}."
    option = typer.Option(
        leaf.option,
        metavar=leaf.metavar or None,
        help=words.replace("`", "") + (" Required." if is_needed else ""),
        show_default=False,
    )
    kinds: dict[type, Any] = {bool: bool, tuple: list[str] | None}
    return Annotated[kinds.get(leaf.kind, str | None), option]
