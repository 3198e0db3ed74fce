"""Finds chips that compute steadily slower than the others, and shares out samples by speed.

Each chip puts the time that it computed for into a sum of the step, at a place of its own, where
all others put zero. So after the sum all chips have the times of all, the same bits, without a
further message. What follows from them is a pure function of these bits, so that all chips have the
same shares in the next step. The speeds are a part of the training state: a chip that joins gets
them with it. What has been seen since the last change is not; it counts within one generation only.

A chip is compared with the middle of all chips: what slows all of them alike is no fault of one. It
has another speed if nearly all of its last steps say so. A change clears what was seen, and the
next one needs more steps, so that a busy machine does not move samples back and forth. Knows no
clock, no samples and no sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Final

from meshmend.topology.failures import Chip, format_chip
from meshmend.train.data.samples import FULL_SPEED, Speeds

EQUAL, BY_SPEED = "equal", "speed"
SHARES: Final = (EQUAL, BY_SPEED)

# In so many steps in a row, but for one of ten, it computes so many times as long as expected, or
# that much shorter: what is far off is seen soon, what is near takes longer.
_RULES: Final = ((10, 1.3), (40, 1.1))
_RULES_IF_SLOW: Final = ((10, 1.3), (40, 1.04))  # a chip that has a smaller share already
_MOST_PATIENCE: Final = 8  # times as many steps, after changes that come soon after one another
_CALM: Final = 200  # times the patience: after so many steps without a change it is 1 again
_MOST_STEPS: Final = _MOST_PATIENCE * max(n_steps for n_steps, _ in _RULES)
_NEARLY_FULL: Final = 90  # from here on a chip counts as one of full speed
_LEAST_S: Final = 1e-3  # in which usual chips compute; less is noise


@dataclass(frozen=True)
class NewSpeed:
    """A chip has another speed: a part of that of the others."""

    chip: Chip
    speed: float


class ChipSpeeds:
    """How fast each chip computes, in hundredths; the same on all chips of a generation."""

    def __init__(self) -> None:
        self._slow: dict[Chip, int] = {}  # those that are not of full speed
        self._generation = 0  # of what follows
        self._seen: dict[Chip, list[float]] = {}  # times as slow as expected, in the last steps
        self._patience = 1
        self._n_calm = 0  # steps without a change

    def of(self, chips: Sequence[Chip]) -> Speeds:
        """Return the speeds of chips."""
        return tuple(self._slow.get(chip, FULL_SPEED) for chip in chips)

    def conclude(
        self,
        generation: int,
        chips: Sequence[Chip],
        n_samples: Sequence[int],
        times_s: Sequence[float],
    ) -> tuple[NewSpeed, ...]:
        """Take in the times of a step that counts, by rank; return the chips with another speed."""
        if generation != self._generation:
            self._generation, self._seen, self._patience, self._n_calm = generation, {}, 1, 0
            self._slow = {chip: speed for chip, speed in self._slow.items() if chip in chips}
        self._n_calm += 1
        if self._n_calm >= _CALM * self._patience:
            self._patience = 1
        paces = {
            chip: time_s / n * self._slow.get(chip, FULL_SPEED)
            for chip, n, time_s in zip(chips, n_samples, times_s, strict=True)
            if n > 0 and time_s > 0
        }
        if len(paces) < 2 or median_low(times_s) < _LEAST_S:
            self._seen = {}
            return ()
        usual = median_low(paces.values())
        self._seen = {
            chip: [*self._seen.get(chip, ()), pace / usual][-_MOST_STEPS:]
            for chip, pace in paces.items()
        }
        changed = {
            chip: speed
            for chip, n in zip(chips, n_samples, strict=True)
            if chip in paces and (speed := self._new_speed(chip, n)) is not None
        }
        if not changed:
            return ()
        self._slow |= changed
        self._slow = {chip: speed for chip, speed in self._slow.items() if speed < FULL_SPEED}
        self._seen, self._n_calm = {}, 0
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return tuple(NewSpeed(chip, speed / FULL_SPEED) for chip, speed in changed.items())

    def _new_speed(self, chip: Chip, n_samples: int) -> int | None:
        """Return the speed of a chip that has another one than is known; None if it has not."""
        seen, known = self._seen[chip], self._slow.get(chip, FULL_SPEED)
        for n_steps, off in _RULES if known == FULL_SPEED else _RULES_IF_SLOW:
            last = sorted(seen[-n_steps * self._patience :])
            n_odd = len(last) // 10
            is_slower = last[n_odd] > off and n_samples > 1  # or its share cannot shrink
            is_faster = last[-1 - n_odd] < 1 / off and known < FULL_SPEED
            if len(last) == n_steps * self._patience and (is_slower or is_faster):
                found = max(1, round(known / median(last)))
                found = FULL_SPEED if found >= _NEARLY_FULL else found
                return None if found == known else found
        return None

    def state(self) -> str:
        """Return the speeds as a text for the training state: `0,1=33 2,3=50`."""
        slow = sorted(self._slow.items())
        return " ".join(f"{format_chip(chip)}={speed}" for chip, speed in slow)

    def load(self, progress: Mapping[str, object]) -> None:
        """Take the speeds of another chip or of a checkpoint; one of equal shares has none."""
        self._slow = {}
        for each in str(progress.get("speeds") or "").split():
            chip, _, speed = each.partition("=")
            self._slow[tuple(map(int, chip.split(",")))] = int(speed)
