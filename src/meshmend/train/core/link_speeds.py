"""Finds links that are steadily slower than planned, from how long they were busy for their bytes.

The kernel counts for each connection how many bytes the other end has acknowledged, and for how
long some were on their way. Before some steps all chips tell each other these figures. All see the
same ones and conclude the same, so nobody has to be asked. A link is compared with the middle of
all links that were busy: what slows all of them alike, such as a busy host, is no fault of one.

Looks are about a quarter of a second apart, which is counted in steps, because clocks differ. A
link that shows another speed in two looks in a row is **suspected**, no more: plans give links
messages of different sizes, and short ones are on their way for as long as a round trip and a busy
host take, whatever the link could carry. So chips then **probe**, five times: all of them send as
many bytes over every link, both ways at once. Nothing but a link itself keeps all of its probes
below what the others do, so its best one decides; the middle one says how slow it is. If that
refutes the suspicion, what the link showed is what its traffic shows under this plan, and the next
suspicion needs one look more: where traffic says little, probes must not take up the job's time.

A plan may leave out a slow link, so that nobody would see it become fast again. So slow links are
also probed now and then, more and more seldom.

The speeds that were found are a part of the training state, as of a step that all chips have done:
a chip that joins gets them with it, and a generation begins with them. What was seen since is not.
Knows no plans and no connections.
"""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from meshmend.topology.failures import Link, SlowLink, parse_slow
from meshmend.topology.mesh import Mesh

Work = tuple[int, int]  # bytes that arrived, and microseconds for which some were on their way

LOOKS: Final = 2  # that have to agree
_MOST_LOOKS: Final = 4  # after suspicions that probes have refuted; a look may take a whole step
PROBES: Final = 5  # of which the best one decides
_LOOK_US: Final = 250_000
_MOST_STEPS_APART: Final = 1024
_LEAST_BYTES: Final = 1 << 15  # in one look; fewer show the latency, not the bandwidth
_LEAST_BUSY_US, _LEAST_BUSY = 2000, 0.01  # in one look, and of the time; less is no measurement
_BUSY: Final = 0.1  # of the time: a link that is idle longer slows nobody down
_LEAST_LINKS: Final = 3  # that were busy, to know what is usual
_SLOWER, _FASTER = 0.6, 1.4  # of what was planned: beyond these a link has another speed
_GRID: Final = 20  # a speed is told in twentieths
_FIRST_PROBES, _MOST_APART = 32, 2048  # looks until slow links are probed; then twice as many
_PROBE_US: Final = 20_000  # that a probe takes on a link of full speed
_PROBE_BYTES: Final = (1 << 17, 1 << 24)  # the shortest and the longest one
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
        self._n_steps, self._next_look = 0, 2
        self._before: list[Work] = []
        self._before_us = 0
        self._usual = 0.0  # bytes in a microsecond of a link of full speed
        self._seen: dict[Link, list[float]] = {}  # the speeds of the last looks
        self._looks = LOOKS  # that have to agree
        self._refuted: dict[Link, float] = {}  # what links show whose probes show something else
        self._suspects: dict[Link, float] = {}  # and what they show; they are being probed
        self._probed: list[dict[Link, float]] = []  # bytes in a microsecond, of the probes so far
        self._n_looks, self._probe_after = 0, _FIRST_PROBES

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

    @property
    def probe_bytes(self) -> int:
        """How many bytes chips send over every link now, each way; 0: nothing is to be probed."""
        if not self._suspects:
            return 0
        shortest, longest = _PROBE_BYTES
        return min(max(shortest, round(_PROBE_US * self._usual)), longest)

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
        """Take in the figures of all chips, by rank; return the links that have another speed.

        They are those of a probe if `probe_bytes` asked for one, else of the traffic since the last
        look.
        """
        if self._suspects:
            return self._conclude_probe(told)
        passed_us = max(numbers[0] for numbers in told)
        self._plan_next_look(passed_us)
        self._n_looks += 1
        least_us = max(_LEAST_BUSY_US, _LEAST_BUSY * passed_us)
        rates, busy = self._rates(told, _LEAST_BYTES, least_us)
        # A link that was idle begins anew: its looks must follow one another.
        self._seen = {link: speeds for link, speeds in self._seen.items() if link in rates}
        if len(rates) < _LEAST_LINKS:
            self._seen = {}
        else:
            self._usual = self._full_rate(rates)
            for link, rate in rates.items():
                speeds = [*self._seen.get(link, ()), rate / self._usual]
                self._seen[link] = speeds[-self._looks :]
        for link, speeds in self._seen.items():
            if len(speeds) == self._looks:
                self._doubt(link, speeds, is_busy=busy[link] >= _BUSY * passed_us)
        if not self._suspects and self._n_looks >= self._probe_after:
            self._suspects = {link: self._usual_of(link) for link in self._slow_links()}
            self._n_looks, self._probe_after = 0, min(2 * self._probe_after, _MOST_APART)
        return ()

    def _doubt(self, link: Link, speeds: Sequence[float], *, is_busy: bool) -> None:
        """Suspect a link if all its looks show another speed than is known, or than was refuted."""
        usual = self._usual_of(link)
        if is_busy and max(speeds) < _SLOWER * usual:
            self._suspects[link] = max(speeds)
        elif min(speeds) > _FASTER * usual:
            if self.mesh.speed_of(link) < 1:
                self._suspects[link] = min(speeds)
            self._refuted.pop(link, None)

    def _conclude_probe(self, told: Sequence[Sequence[int]]) -> tuple[SlowLink, ...]:
        rates, _ = self._rates(told, 1, 1)
        self._probed.append(rates)
        if rates:
            self._usual = self._full_rate(rates)
        if len(self._probed) < PROBES:
            return ()
        best, middle = self._probed_speeds(max), self._probed_speeds(median)
        changed = []
        # Of links that are probed now and then nothing else was said.
        if any(shown != self._usual_of(link) for link, shown in self._suspects.items()):
            self._looks = min(self._looks + 1, _MOST_LOOKS)
        for link, shown in sorted(self._suspects.items()):
            known = self.mesh.speed_of(link)
            is_slower = best.get(link, known) < _SLOWER * known
            is_faster = middle.get(link, known) > _FASTER * known
            if (is_slower or is_faster) and _told(middle[link]) != known:
                changed.append(SlowLink(link, _told(middle[link])))
            else:
                self._refuted[link] = shown
            self._seen.pop(link, None)
        self._suspects, self._probed = {}, []
        if changed:
            self.mesh = self.mesh.slowed(*changed)
            self._seen, self._refuted, self._looks = {}, {}, LOOKS  # there will be other plans
            self._n_looks, self._probe_after = 0, _FIRST_PROBES
        return tuple(changed)

    def _probed_speeds(self, chosen: Callable[[list[float]], float]) -> dict[Link, float]:
        """Return the speed of each link by one of its probes."""
        links = {link for rates in self._probed for link in rates}
        rates = {
            link: chosen([each[link] for each in self._probed if link in each]) for link in links
        }
        full = self._full_rate(rates) if rates else 1.0
        return {link: rate / full for link, rate in rates.items()}

    def _usual_of(self, link: Link) -> float:
        """Return the speed that a link's traffic is known to show."""
        return self._refuted.get(link, self.mesh.speed_of(link))

    def _full_rate(self, rates: dict[Link, float]) -> float:
        """Return the rate of a link of full speed, by the middle of all that have one."""
        return median(rate / self.mesh.speed_of(link) for link, rate in rates.items())

    def _slow_links(self) -> list[Link]:
        """Return the links of live chips that are known to be slow."""
        ranks = self.mesh.rank_of
        slow = {each.link for each in self.mesh.slow} - self.mesh.failed_links
        return [link for link in sorted(slow) if link.first in ranks and link.second in ranks]

    def _plan_next_look(self, passed_us: int) -> None:
        steps = self._next_look
        if passed_us > 0:
            steps = math.ceil(_LOOK_US * self._n_steps / passed_us)
        self._n_steps, self._next_look = 0, min(max(1, steps), _MOST_STEPS_APART)

    def _rates(
        self, told: Sequence[Sequence[int]], least_bytes: int, least_us: float
    ) -> tuple[dict[Link, float], dict[Link, int]]:
        """Return the bytes in a microsecond of each link that was used, and for how long it was.

        Both are those of its slower direction.
        """
        rates: dict[Link, float] = {}
        busy: dict[Link, int] = {}
        for rank, numbers in enumerate(told):
            for port, other in enumerate(self.mesh.neighbor_ranks[rank].tolist()):
                n_bytes, busy_us = numbers[1 + 2 * port], numbers[2 + 2 * port]
                if other < 0 or n_bytes < least_bytes or busy_us < least_us:
                    continue
                link = Link.between(self.mesh.live[rank], self.mesh.live[other])
                if n_bytes / busy_us < rates.get(link, math.inf):
                    rates[link], busy[link] = n_bytes / busy_us, busy_us
        return rates, busy


def _told(speed: float) -> float:
    """Return a speed as chips tell it: in twentieths, and 1 from nearly that on."""
    return 1.0 if speed >= _FULL else max(1, round(_GRID * speed)) / _GRID
