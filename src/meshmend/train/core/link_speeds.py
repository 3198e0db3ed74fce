"""Finds links that are steadily slower than planned, from how long they were busy for their bytes.

The kernel counts for each connection how many bytes the other end has acknowledged, and for how
long some were on their way. Before some steps all chips tell each other these figures. All see the
same ones and conclude the same, so nobody has to be asked. A link is compared with the middle of
all links that were busy: what slows all of them alike, such as a busy host, is no fault of one.

Looks are about half a second apart, which is counted in steps, because clocks differ. The middle
of the last five looks counts: one or two that a busy host disturbed change nothing.

A plan may leave out a slow link, so that nobody would see it become fast again. Now and then, more
and more seldom, chips send a **probe** over such links before five looks in a row.

The speeds that were found are a part of the training state, as of a step that all chips have done:
a chip that joins gets them with it, and a generation begins with them. What was seen since is not.
Knows no plans and no connections.
"""

import math
from collections.abc import Collection, Sequence
from statistics import median
from typing import Final

from meshmend.topology.failures import Link, SlowLink, parse_slow
from meshmend.topology.mesh import Mesh

Work = tuple[int, int]  # bytes that arrived, and microseconds for which some were on their way

LOOKS: Final = 5  # the middle one counts
_LOOK_US: Final = 500_000
_MOST_STEPS_APART: Final = 1024
_LEAST_BYTES: Final = 1 << 16  # in one look; fewer show the latency, not the bandwidth
_LEAST_BUSY_US, _LEAST_BUSY = 2000, 0.01  # in one look, and of the time; less is no measurement
_BUSY: Final = 0.1  # of the time: a link that is idle longer slows nobody down
_LEAST_LINKS: Final = 3  # that were busy, to know what is usual
_SLOWER, _FASTER = 0.6, 1.4  # of what was planned: beyond these a link has another speed
_GRID: Final = 20  # a speed is told in twentieths
_FIRST_PROBES, _MOST_APART = 16, 1024  # looks until idle links are probed; each time twice as many
_PROBE_US: Final = 4000  # that a probe takes on a link of full speed, if it is not the shortest
_PROBE_BYTES: Final = (1 << 17, 1 << 26)  # the shortest and the longest one
_FULL: Final = 0.9  # from here on a link counts as one of full speed


class LinkSpeeds:
    """What the chips of one generation know about their links; the same on all of them.

    `known` are the speeds that an earlier generation found: the text of its `found`.
    """

    def __init__(self, mesh: Mesh, known: str = "") -> None:
        speeds = [parse_slow(each) for each in known.split()]
        self._given = mesh
        # With the speeds that are known now. A checkpoint may be that of another mesh.
        self.mesh = mesh.slowed(*(each for each in speeds if mesh.has_link(each.link)))
        self._seen: dict[Link, list[float]] = {}  # the speeds of the last looks
        self._n_steps, self._next_look = 0, 2
        self._usual = 0.0  # bytes in a microsecond of a link of full speed
        self._n_looks, self._probe_after = 0, _FIRST_PROBES
        self._idle: set[Link] = set()  # slow links that have no traffic, but for probes
        self._before: list[Work] = []
        self._before_us = 0

    @property
    def found(self) -> tuple[SlowLink, ...]:
        """The speeds that differ from those that the job was given; also those of dead links."""
        links = sorted({each.link for each in self._given.slow | self.mesh.slow})
        speeds = (SlowLink(link, self.mesh.speed_of(link)) for link in links)
        return tuple(each for each in speeds if each.speed != self._given.speed_of(each.link))

    def is_due(self) -> bool:
        """Count a step; return whether chips look at their links before it."""
        self._n_steps += 1
        return self._n_steps >= self._next_look

    def probes(self) -> tuple[list[tuple[int, int]], int]:
        """Return the ranks to send a probe from and to before this look, and its bytes."""
        if self._n_looks < self._probe_after:
            return [], 0
        ranks = self.mesh.rank_of
        ways = [(ranks[link.first], ranks[link.second]) for link in sorted(self._idle)]
        shortest, longest = _PROBE_BYTES
        n_bytes = min(max(shortest, round(_PROBE_US * self._usual)), longest)
        return [*ways, *((other, one) for one, other in ways)], n_bytes

    def mine(self, work: Sequence[Work], now_us: int) -> list[int]:
        """Return this chip's figures since the last look, for all chips: of each port, and time."""
        before = self._before or list(work)
        passed = now_us - self._before_us if self._before else 0
        # A connection that was made anew counts from zero.
        since = [
            (max(0, new[0] - old[0]), max(0, new[1] - old[1]))
            for new, old in zip(work, before, strict=True)
        ]
        self._before, self._before_us = list(work), now_us
        return [passed, *(number for pair in since for number in pair)]

    def conclude(self, told: Sequence[Sequence[int]]) -> tuple[SlowLink, ...]:
        """Take in the figures of all chips, by rank; return the links that have another speed."""
        passed_us = max(numbers[0] for numbers in told)
        self._plan_next_look(passed_us)
        rates, busy = self._rates(told, passed_us)
        self._count_look(rates)
        if len(rates) < _LEAST_LINKS:
            self._seen.clear()
            return ()
        usual = median(rate / self.mesh.speed_of(link) for link, rate in rates.items())
        self._usual = usual
        # A link that was idle begins anew: its looks must follow one another.
        seen = {link: [*self._seen.get(link, ()), rate / usual] for link, rate in rates.items()}
        self._seen = {link: speeds[-LOOKS:] for link, speeds in seen.items()}
        changed = []
        for link, speeds in sorted(self._seen.items()):
            speed, known = median(speeds), self.mesh.speed_of(link)
            is_faster = speed > _FASTER * known and known < 1
            is_slower = speed < _SLOWER * known and busy[link] >= _BUSY * passed_us
            if len(speeds) == LOOKS and (is_faster or is_slower):
                # The speed may have changed during a look: the middle of the last three skips it.
                told_speed = _told(median(speeds[-LOOKS // 2 :]))
                if told_speed != known:
                    changed.append(SlowLink(link, told_speed))
        if changed:
            self.mesh = self.mesh.slowed(*changed)
            self._seen = {}
            self._n_looks, self._probe_after = 0, _FIRST_PROBES
        return tuple(changed)

    def _count_look(self, used: Collection[Link]) -> None:
        self._n_looks += 1
        if self._n_looks <= self._probe_after:
            slow = {each.link for each in self.mesh.slow} - self.mesh.failed_links - set(used)
            ranks = self.mesh.rank_of
            self._idle = {link for link in slow if link.first in ranks and link.second in ranks}
        elif self._n_looks == self._probe_after + LOOKS:
            self._n_looks, self._probe_after = 0, min(2 * self._probe_after, _MOST_APART)

    def _plan_next_look(self, passed_us: int) -> None:
        steps = self._next_look
        if passed_us > 0:
            steps = math.ceil(_LOOK_US * self._n_steps / passed_us)
        self._n_steps, self._next_look = 0, min(max(1, steps), _MOST_STEPS_APART)

    def _rates(
        self, told: Sequence[Sequence[int]], passed_us: int
    ) -> tuple[dict[Link, float], dict[Link, int]]:
        """Return the bytes in a microsecond of each link that was used, and for how long it was.

        Both are those of its slower direction.
        """
        rates: dict[Link, float] = {}
        busy: dict[Link, int] = {}
        least_us = max(_LEAST_BUSY_US, _LEAST_BUSY * passed_us)
        for rank, numbers in enumerate(told):
            for port, other in enumerate(self.mesh.neighbor_ranks[rank].tolist()):
                n_bytes, busy_us = numbers[1 + 2 * port], numbers[2 + 2 * port]
                if other < 0 or n_bytes < _LEAST_BYTES:
                    continue
                link = Link.between(self.mesh.live[rank], self.mesh.live[other])
                if busy_us < (_LEAST_BUSY_US if link in self._idle else least_us):
                    continue
                if n_bytes / busy_us < rates.get(link, math.inf):
                    rates[link], busy[link] = n_bytes / busy_us, busy_us
        return rates, busy


def _told(speed: float) -> float:
    """Return a speed as chips tell it: in twentieths, and 1 from nearly that on."""
    return 1.0 if speed >= _FULL else max(1, round(_GRID * speed)) / _GRID
