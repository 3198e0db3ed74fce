"""What HTML pages are made of: the document and its style, cards, tables, headline figures.

Everything is inline: a page loads nothing from anywhere. Pictures carry their colours as
attributes; where the reader's system is dark, the style sheet exchanges those it knows.
"""

from collections.abc import Mapping, Sequence
from html import escape

from meshmend.pages.draw.chart import ON_COLOUR
from meshmend.pages.draw.svg import (
    AMBER,
    BACKGROUND,
    BLUE,
    FAILED_FILL,
    FAINT,
    GREEN,
    INK,
    LINK,
    LIVE_EDGE,
    LIVE_FILL,
    PURPLE,
    RED,
    SOFT_INK,
    STRANDED_FILL,
    YELLOW_FILL,
    lighter,
)

_LIGHT = {
    "page": "#f4f6f8", "card": BACKGROUND, "line": FAINT, "ink": INK, "soft": SOFT_INK,
    "good": GREEN, "bad": RED, "bar": lighter(RED, 0.55), "bar-good": lighter(GREEN, 0.5),
}  # fmt: skip
_DARK = {
    "page": "#0f141a", "card": "#171e26", "line": "#2b3541", "ink": "#e4e9ef", "soft": "#98a5b3",
    "good": "#4cc9a0", "bad": "#ff8a75", "bar": "#8c4033", "bar-good": "#1f6b54",
}  # fmt: skip
# Colours of pictures as a dark page shows them.
_IN_THE_DARK = {
    BACKGROUND: "#171e26", INK: "#e4e9ef", SOFT_INK: "#98a5b3", FAINT: "#2b3541",
    LIVE_FILL: "#2a3541", LIVE_EDGE: "#718093", LINK: "#4a5868", STRANDED_FILL: "#4b5663",
    FAILED_FILL: "#6b2e25", YELLOW_FILL: "#7d6a1c", RED: "#ff7d66", BLUE: "#59aef0",
    GREEN: "#3fbf95", PURPLE: "#d983b4", lighter(AMBER, 0.86): "#2f2716",
    lighter(BLUE, 0.6): "#2d5675", lighter(GREEN, 0.62): "#1f6b54",
    ON_COLOUR: "#0f141a",
}  # fmt: skip

# Pictures have classes too, such as `bar`: where one name serves both, the rule says `span`.
PHONE_SIZE = 17.0  # of the letters of charts on a phone, in the last rules below
_STYLE = """
body { margin: 0; background: var(--page); color: var(--ink);
       font: 15px/1.5 Helvetica, Arial, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 8px 0 4px; }
h2 { font-size: 19px; margin: 34px 0 8px; }
p { max-width: 100ch; margin: 8px 0; }
.soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
        padding: 14px 18px; margin: 12px 0; overflow-x: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; }
.figures .card { margin: 0; padding: 12px 16px; }
.figures .name { color: var(--soft); font-size: 13px; }
.figures .value { font-size: 23px; font-weight: 600; line-height: 1.3; white-space: nowrap;
                  font-variant-numeric: tabular-nums; }
.figures .note { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
td:first-child, th:first-child, .left { text-align: left; }
tbody tr:last-child td { border-bottom: 0; }
span.bar { display: inline-block; height: 10px; border-radius: 2px; background: var(--bar);
            vertical-align: middle; min-width: 1px; }
.bar.repair { background: var(--bar-good); } .bar.noticed { background: var(--bad); }
.bar.noticed.repair { background: var(--good); }
details table { margin-top: 10px; }
.bar + .bar { margin-left: 1px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(225px, 1fr));
            gap: 12px; align-items: stretch; }
.pictures .card { margin: 0; padding: 12px 14px; font-size: 13px; line-height: 1.4; }
.pictures b { display: block; font-size: 14px; }
.pictures svg { margin: 6px 0; }
summary { cursor: pointer; font-weight: 600; }
.events { font: 12.5px/1.55 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
          white-space: pre-wrap; margin: 10px 0 0; }
svg { display: block; max-width: 100%; height: auto; }
.chart svg { min-width: 860px; } /* on a narrow page it scrolls: its text stays readable */
.unbroken td { white-space: nowrap; }
@media (max-width: 720px) { /* a phone, or a page beside another: charts shrink, and scroll */
  main { padding: 16px 12px 40px; } .card { padding: 10px 12px; }
  .figures { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
  .figures .value { white-space: normal; font-size: 20px; }
  main > .card > svg { min-width: 640px; overflow: visible; } .chart svg text { font-size: 17px; }
  th, td { padding: 4px 6px; } .unbroken span.bar { display: none; }
}
"""


def page(title: str, parts: Sequence[str], *, style: str = "", dark: bool = True) -> str:
    """Return a complete HTML document, light or, unless denied, dark as the reader's system is.

    `style` adds rules to those that all pages share.
    """
    schemes = "light dark" if dark else "light"
    rules = _named(_LIGHT) + _STYLE + style + (_dark_rules() if dark else "")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="{schemes}">'
        f"<style>{rules}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def card(content: str, *, look: str = "") -> str:
    """Return content, which is HTML, in a box; `look` is a further class of the style.

    One that may be wider than its page scrolls by itself, also with the keyboard.
    """
    is_wide = content.startswith("<svg") or "<table" in content
    scrolls = ' tabindex="0" role="group" aria-label="Scrolls sideways"' if is_wide else ""
    return f'<div class="card {look}"{scrolls}>{content}</div>'


def headline(name: str, value: str, note: str = "", *, mood: str = "") -> str:
    """Return one figure in large type, with its name above and a note below."""
    return card(
        f'<div class="name">{escape(name)}</div><div class="value {mood}">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div>'
    )


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (),
    caption: str = "",
) -> str:
    """Return a table of cells that are HTML; the columns in `left` are aligned left."""

    def row(cells: Sequence[str], tag: str) -> str:
        looks = [' class="left"' if at in left else "" for at in range(len(cells))]
        pairs = zip(cells, looks, strict=True)
        named = [(tag if cell else "td", look, cell) for cell, look in pairs]  # no nameless head
        return (
            "<tr>" + "".join(f"<{of}{look}>{cell}</{of}>" for of, look, cell in named) + "</tr>\n"
        )

    body = "".join(row(cells, "td") for cells in rows)
    head = f"<thead>{row(heads, 'th')}</thead>" if heads else ""
    above = f"<caption>{caption}</caption>" if caption else ""
    return f"<table>{above}{head}<tbody>{body}</tbody></table>"


def _named(colours: Mapping[str, str]) -> str:
    return ":root{" + "".join(f"--{name}:{colour};" for name, colour in colours.items()) + "}"


def _dark_rules() -> str:
    swaps = "".join(
        f'svg [fill="{old}"]{{fill:{new}}}svg [stroke="{old}"]{{stroke:{new}}}'
        for old, new in _IN_THE_DARK.items()
    )
    return f"@media (prefers-color-scheme:dark){{{_named(_DARK)}{swaps}}}"
