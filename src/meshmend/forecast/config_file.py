"""The file of `--config`: one TOML table with the inputs of a forecast by name."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from meshmend.errors import InputError
from meshmend.forecast.inputs import INPUTS

_EXAMPLES = {
    "mesh": "32x32",
    "host": "4x2",
    "board": "2x2",
    "rack": "32x8",
    "failures-per-1000-host-days": "6.5",
    "repair": "24h",
    "spares": "3",
    "compute": "90ms",
}
_ON = ("mesh", "host", "failures-per-1000-host-days", "repair", "spares")
_TITLES = {
    "machine": "The machine.",
    "failures": "Failures: how often one domain of each kind fails.",
    "repair": "Repair. Times need a unit: s, min, h, d.",
    "job": "The job.",
    "spares": "Spares.",
    "step": "A step of the job.",
}


def read_config(path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the inputs of a file as texts, and the presets that it names.

    Raises:
        InputError: the file cannot be read, or a value is neither a text nor a number.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"cannot read {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} needs to be TOML, but {error}") from None
    presets = document.pop("presets", [])
    if not isinstance(presets, list) or not all(isinstance(name, str) for name in presets):
        raise InputError(f"{path}: presets needs a list of names, but got {presets!r}")
    values = {}
    for key, value in document.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InputError(f"{path}: {key} needs a text or a number, but got {value!r}")
        values[key.replace("_", "-")] = str(value)
    return values, tuple(presets)


def example_config() -> str:
    """Return a file with every input, its default, and what it means."""
    return "\n".join(_example_lines()) + "\n"


def _example_lines() -> Iterator[str]:
    yield "# Inputs of `meshmend forecast --config FILE`. A line that begins with # is a default."
    yield '# presets = ["meta-rsc-1"]  # public rates: `meshmend forecast --list-presets`'
    group = ""
    for each in INPUTS.values():
        if each.group != group:
            group = each.group
            yield f"\n# {_TITLES[group]}"
        text = _EXAMPLES.get(each.name, each.default or "")
        is_number = text.replace(".", "", 1).isdigit()
        value = text if is_number else f'"{text}"'
        hide = "" if each.name in _ON else "# "
        yield f"{hide}{each.name} = {value}  # {each.words}"
