"""Makes pages of the site that are not files in docs/: from the README, notebooks, and the code.

A hook of MkDocs (see mkdocs.yml). It also turns links to files outside docs/ into plain text,
because the site does not have these files.
"""

import inspect
import json
import re
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {
    "tutorial.md": "a_hole_a_plan_a_kill.ipynb",
    "jax-notebook.md": "jax_around_a_hole.ipynb",
}
_PROPERTIES = property | cached_property
PUBLIC = ("meshmend", "meshmend.train", "meshmend.torch", "meshmend.jax")


def on_config(config: Any) -> Any:
    """Let no heading's name begin with a digit, which the theme's script fails on; for MkDocs."""

    def slug(value: str, separator: str) -> str:
        return re.sub(r"^(?=\d)", "n", slugify(value, separator))

    config["mdx_configs"]["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here; called by MkDocs."""
    pages = {
        "index.md": _first_page(),
        "explorer.html": explorer(),
        "reference-cli.md": command_line(),
        "reference-api.md": python_api(),
        **{name: notebook(ROOT / "examples/notebooks" / path) for name, path in NOTEBOOKS.items()},
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return a page without links to files that the site does not have; called by MkDocs."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def kept(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path = (folder / target.partition("#")[0]).resolve()
        if path == ROOT / "README.md":
            return f"[{match[1]}]({'../' * page.file.src_uri.count('/')}index.md)"
        inside = path.is_relative_to(ROOT / "docs") and path.suffix in {
            ".md",
            ".svg",
            ".png",
            ".html",
        }
        return match[0] if inside else match[1]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", kept, markdown)


# The theme's switch between light and dark sets these, and fails where they are not.
_STYLES_OF_THE_SWITCH = '<style id="hljs-light"></style><style id="hljs-dark"></style></head>'


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return a page with what the theme's script needs; called by MkDocs.

    Code and tables that are wider than a phone scroll by themselves, also with the keyboard.
    """
    wide = output.replace("<pre>", '<pre tabindex="0">')
    wide = wide.replace('<div class="navbar ', '<div role="banner" class="navbar ', 1)
    wide = wide.replace("<th></th>", "<td></td>")  # a head without a name is no head
    wide = wide.replace("<table>", f"{_SCROLLS}<table>").replace("</table>", "</table></div>")
    return wide.replace("</head>", _STYLES_OF_THE_SWITCH, 1)


_SCROLLS = '<div class="scroll" tabindex="0" role="group" aria-label="Table">'


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Return a page that is no document, such as 404.html; called by MkDocs."""
    return output_content.replace("</head>", _STYLES_OF_THE_SWITCH, 1)


_EXPLORER = """## Break it

<iframe src="explorer.html" title="The explorer: click a board dead" height="760"></iframe>

[The explorer](explore.md) as `meshmend explore --export` writes it: [alone](explorer.html).

"""


def _first_page() -> str:
    """Return the README as a page of docs/, where its links start one folder deeper."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    return readme.replace("## What it does", f"{_EXPLORER}## What it does", 1)


def explorer() -> str:
    """Return the explorer of an 8x8 mesh that lost a board, as one page."""
    from meshmend.pages.explore.explorer_question import ExplorerQuestion
    from meshmend.pages.explore.kept_page import kept_page
    from meshmend.planning.progress import no_progress
    from meshmend.planning.target import Target
    from meshmend.topology.mesh import Mesh

    question = ExplorerQuestion(Mesh((8, 8)).without("2x2@2,2"), Target().with_("10MB", None))
    return kept_page(question, most_bytes=1_000_000, progress=no_progress).text


def command_line() -> str:
    """Return the reference of all commands, from their own help."""
    from meshmend.cli.main import commands_by_name

    lines = ["# Command line", "", "Every command prints this with `--help`.", ""]
    for name, command in commands_by_name().items():
        lines += [f"## {name}", "", inspect.cleandoc(command.help or ""), ""]
        options = [_option(each) for each in command.params]
        lines += ["| option | what it does | default |", "| --- | --- | --- |", *options, ""]
    return "\n".join(lines)


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{each}`" for each in parameter.opts)
    if not names.startswith("`-"):
        names = f"`{parameter.metavar or parameter.name}`"
    elif parameter.metavar:
        names += f" `{parameter.metavar}`"
    words = (getattr(parameter, "help", None) or "").replace("|", r"\|")
    default = parameter.default
    shown = "" if default is None or callable(default) else f"`{default}`"
    return f"| {names} | {words} | {shown} |"


def python_api() -> str:
    """Return the public names of the packages, with their signatures and docstrings."""
    lines = ["# Python", "", "The public names. Modules below them may move between releases.", ""]
    for module_name in PUBLIC:
        try:
            module = import_module(module_name)
        except ImportError as error:  # an extra that is not installed here
            lines += [f"## {module_name}", "", f"Not shown: {error}.", ""]
            continue
        lines += [f"## {module_name}", "", *_code_blocks(inspect.getdoc(module) or ""), ""]
        for name in sorted(module.__all__):
            lines += _entry(name, getattr(module, name), level=3)
    return "\n".join(lines)


def _entry(name: str, value: Any, *, level: int) -> list[str]:
    if not (inspect.isclass(value) or callable(value)):
        return [f"{'#' * level} {name}", ""]
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        signature = "(...)"
    shown = re.sub(r"'([^']*)'", r"\1", signature)
    lines = [f"{'#' * level} {name}", "", "```python", f"{name}{shown}", "```", ""]
    lines += [*_code_blocks(inspect.getdoc(value) or ""), ""]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        for method, own in sorted(vars(value).items()):
            called = callable(own) or isinstance(own, classmethod | staticmethod)
            if method.startswith("_") or not (called or isinstance(own, _PROPERTIES)):
                continue
            if doc := inspect.getdoc(own):
                lines.append(f"- `{method}{'()' if called else ''}`: {doc.splitlines()[0]}")
        lines.append("")
    return lines


def _code_blocks(doc: str) -> list[str]:
    """Return a docstring as Markdown; its examples are indented, so they are code already."""
    return [
        re.sub(r"^Raises:$", "**Raises**\n", line) if not line.startswith("    ") else line
        for line in doc.splitlines()
    ]


def notebook(path: Path) -> str:
    """Return a notebook as Markdown, with what it printed and drew; the tests run it anew."""
    book = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            lines += _output(output)
    lines += ["", f"This page is the notebook `{path.relative_to(ROOT)}`; the tests run it."]
    return "\n".join(lines)


def _output(output: dict[str, Any]) -> list[str]:
    """Return what a cell printed, or its picture, which must be one line to stay as it is."""
    if output["output_type"] == "stream":
        return ["```text", "".join(output["text"]).rstrip(), "```", ""]
    data = output.get("data", {})
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            return [f"<div>{re.sub(chr(10) + '[ ]*', ' ', ''.join(data[kind]))}</div>", ""]
    return ["```text", "".join(data["text/plain"]), "```", ""] if "text/plain" in data else []
