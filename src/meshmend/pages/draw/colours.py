"""The colours of all pictures: told apart by colour-blind readers, and readable on white.

The named colours and `SERIES` follow Okabe and Ito's palette (2008), darkened where thin lines
on white asked for it. `heat` is a sequential scale that darkens steadily, so it survives a
black-and-white print.
"""

from typing import Final

RED: Final = "#c8321e"
BLUE: Final = "#0064a8"
AMBER: Final = "#b26a00"
GREEN: Final = "#00785a"
PURPLE: Final = "#a6457c"
LIMIT: Final = "#1f2933"  # the physical limit, in every chart; no series has this colour

FAILED_FILL: Final = "#f3b6ab"
STRANDED_FILL: Final = "#dde1e6"
LIVE_FILL: Final = "#e9eef4"
LIVE_EDGE: Final = "#8c9bab"
LINK: Final = "#b6c0cb"
FAINT: Final = "#e3e8ee"
BLUE_FILL: Final = "#cfe3f5"
YELLOW_FILL: Final = "#fbe38e"

SERIES: Final = (BLUE, "#d55e00", GREEN, PURPLE, "#3a9bd9", "#8a6d00", "#444b54", "#7a5cc0")

_HEAT = (
    (222, 233, 244),
    (150, 196, 226),
    (72, 142, 205),
    (98, 84, 178),
    (122, 36, 120),
    (70, 4, 46),
)


def series(index: int) -> str:
    """Return the colour of the index-th ring, route or curve; they repeat after eight."""
    return SERIES[index % len(SERIES)]


def heat(share: float) -> str:
    """Return the colour of a share from 0 (light) to 1 (dark)."""
    at = min(max(share, 0.0), 1.0) * (len(_HEAT) - 1)
    low = min(int(at), len(_HEAT) - 2)
    return _blend(_HEAT[low], _HEAT[low + 1], at - low)


def lighter(colour: str, share: float) -> str:
    """Return a colour moved by a share from 0 to 1 towards white."""
    parts = (int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16))
    return _blend(parts, (255, 255, 255), share)


def _blend(one: tuple[int, int, int], other: tuple[int, int, int], share: float) -> str:
    return "#" + "".join(
        f"{round(a + share * (b - a)):02x}" for a, b in zip(one, other, strict=True)
    )
