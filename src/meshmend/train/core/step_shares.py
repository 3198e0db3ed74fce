"""Where the job is, which samples of a step each chip uses, and how long this one computed.

All chips know the shares of all: they follow from the place in the row of samples and, for shares
by speed, from times that travel in the sums of the steps before.
"""

import time
from collections.abc import Sequence

from meshmend.membership.events import ChipRestored, ChipSlow
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.topology.failures import Chip
from meshmend.train.core.chip_speeds import BY_SPEED, ChipSpeeds
from meshmend.train.core.job_settings import JobSettings
from meshmend.train.core.learner import Learner
from meshmend.train.core.worker_environment import WorkerEnvironment, coordinator_client
from meshmend.train.data.samples import Indices, Share, batch_of, share_by_speed, share_of


class StepShares:
    """One chip's view of the steps and of their shares.

    `step` is the number of steps that are done, `in_flight` the share that this chip computes, None
    if there is none.
    """

    def __init__(
        self,
        learner: Learner,
        settings: JobSettings,
        environment: WorkerEnvironment,
        injection: SelfInjection,
    ) -> None:
        self._learner, self._settings = learner, settings
        self._environment, self._injection = environment, injection
        self.order = settings.order()
        self.step = 0
        self.in_flight: Share | None = None
        self.position = 0  # where the next step begins in the row of samples
        self.speeds = ChipSpeeds() if settings.shared_by == BY_SPEED else None
        self._began = 0.0  # when this chip began to compute a share

    def batch(self, n_chips: int) -> int:
        """Return how many samples the next step uses."""
        n_at_start = self._environment.n_live_at_start
        return batch_of(self._settings.policy, self._settings.batch, n_chips, n_at_start)

    def of(self, rank: int, chips: Sequence[Chip]) -> Share:
        """Return the share of the next step of a rank among some chips."""
        batch = self.batch(len(chips))
        if self.speeds is None:
            return share_of(self.position, batch, rank, len(chips))
        return share_by_speed(self.position, batch, rank, self.speeds.of(chips))

    def begin(self, share: Share) -> Indices:
        """Return the samples of a share that this chip computes from now on."""
        self.in_flight, samples = share, self.order.samples(share.start, share.stop)
        self._began = time.perf_counter()
        return samples

    def end(self, share: Share, *, waited_s: float) -> None:
        """End the share in flight, and put into the sums how long it took, where that is asked for.

        For `waited_s` of it this chip has waited for other chips.
        """
        self.in_flight, notes = None, self._learner.sums.notes
        notes[:] = 0
        if share.n_samples == 0:
            return
        began = self._began + waited_s
        self._injection.throttle(self.step, time.perf_counter() - began)
        if len(notes):
            mine = self._environment.whole.rank_of[self._environment.chip]
            notes[mine] = time.perf_counter() - began

    def note_speeds(self, step: int, generation: int, chips: Sequence[Chip]) -> None:
        """Find chips that are slow, in the sums of a step that counts."""
        notes, whole = self._learner.sums.notes, self._environment.whole
        if self.speeds is None or not len(notes):
            return
        mine = self._environment.chip
        times_s = [float(notes[whole.rank_of[chip]]) for chip in chips]
        counts = [self.of(rank, chips).n_samples for rank in range(len(chips))]
        for new in self.speeds.conclude(generation, chips, counts, times_s):
            if mine == chips[0]:
                event = ChipRestored if new.speed == 1 else ChipSlow
                coordinator_client().report(event(new.chip, new.speed, step, mine))
