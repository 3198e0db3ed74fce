"""A chip that has or computes wrong numbers: how it is found in a step, and what follows.

Two checks look for it: the states of all chips are compared, and shares are computed twice. What
they find makes the step void; it is done again, without the chip if that is wrong. Sums and shares
of steps before may have been wrong too. So the job goes on from the newest checkpoint of a step
that is known to be right, or as the user has told it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from meshmend.errors import TransportError, WrongResultError
from meshmend.membership.events import WrongResult, WrongSum
from meshmend.topology.failures import Chip
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.job_settings import RESTORE, STOP, JobSettings
from meshmend.train.core.learner import Learner
from meshmend.train.core.share_checks import Finding, Kind, ShareChecks
from meshmend.train.core.step_shares import StepShares
from meshmend.train.core.worker_environment import coordinator_client
from meshmend.train.core.worker_loop import WorkerLoop
from meshmend.train.data.samples import Seen, Share
from meshmend.train.state.checkpoint_writer import CheckpointWriter
from meshmend.train.state.comparison import MOST_NAMES, StateComparison


class WrongNumbers:
    """One chip's part in finding chips that are wrong, and in going on without them.

    `more` returns what all chips must know alike beside their states, in words, `seen` what this
    chip has read of a stream. Without `mends`, no chip gets the state of others because its own is
    wrong: the job ends.
    """

    def __init__(
        self,
        shares: StepShares,
        learner: Learner,
        exchange: Exchange,
        loop: WorkerLoop,
        saving: CheckpointWriter,
        settings: JobSettings,
        *,
        more: Callable[[], Mapping[str, str]],
        seen: Callable[[], Seen | None],
        mends: bool,
    ) -> None:
        self._shares, self._learner, self._exchange = shares, learner, exchange
        self._loop, self._saving, self._policy = loop, saving, settings.wrong_result_policy
        self._comparison = StateComparison(
            learner,
            exchange,
            every=settings.compare_every,
            more=more,
            mend=self._mend if mends else None,
            seen=seen,
        )
        self._checks: ShareChecks | None = None  # None if nothing is computed twice
        if settings.checked_every:
            self._checks = ShareChecks(learner.sums, exchange, every=settings.checked_every)
        self._compared_in = 0  # the last generation whose chips were compared after the last step
        self.goes_back_to: int | None = None  # set while the state of all chips may be wrong

    @property
    def right_until(self) -> int | None:
        """The last step that is known to be right; None if none is."""
        return self._checks.right_until if self._checks else None

    def begin(self) -> list[int]:
        """Begin the next step; return the ranks whose shares this chip computes before its own."""
        step = self._shares.step
        second = [] if self._checks is None else self._checks.begin(step)
        moved = self._loop.has_moved_state
        self._comparison.begin(step, has_moved_state=moved, is_due=bool(second))
        return second

    def note_own(self, number: int) -> None:
        """Take the hash of what this chip puts into a sum; it is complete now."""
        if self._checks is not None:
            self._checks.note_own(number)

    def add_second(self, share: Share) -> None:
        """Take the hash of a second share, which the payloads hold now if it has samples."""
        assert self._checks is not None
        self._checks.add_second(is_empty=share.n_samples == 0)

    def compare(self, *, is_strange: bool) -> Finding | None:
        """Compare states and shares, if that is due; return why the step does not count, if so.

        A step `is_strange` if its sums are not finite: a flipped bit may be why.
        """
        if is_strange:
            self._learner.undo()
            self._comparison.take()
        step, checks, chips = self._shares.step, self._checks, self._exchange.members
        told = None if checks is None else checks.told()
        compared = self._comparison.complete(step, chips, told=told)
        if compared is not None and (compared.mended or compared.wrong):
            return Finding(is_void=True, wrong=tuple(map(chips.index, compared.wrong)))
        if checks is None:
            return None
        if compared is not None and checks.kind is not Kind.NOTHING:
            finding = checks.judge(step, compared.told, chips)
            return finding if finding.is_void else None
        return Finding(is_void=True) if is_strange and checks.force(step) else None

    def compare_at_last(self) -> bool:
        """Compare the states of all chips after the last step; return False if the mesh changed.

        That is done once in each generation that the job may end in, so all chips do it or none.
        """
        number = self._loop.number
        if self._compared_in == number:
            return True
        self._comparison.take()

        def compare() -> None:
            self._comparison.complete(self._shares.step, self._exchange.members)

        if not self._loop.attempt(compare, is_step=False):
            self._loop.recover(after=number)
            return False
        self._compared_in = number
        return True

    def act_on(self, finding: Finding) -> None:
        """Go on after a comparison that has found a chip, or two chips, wrong."""
        # If it was a link, that is known before a chip is blamed.
        self._exchange.transport.sum_payloads()
        number, chips = self._loop.number, self._exchange.members
        step = self._shares.step + 1
        if finding.sums is not None and self._exchange.chip == chips[0]:
            among = tuple(chips[rank] for rank in finding.sums)
            coordinator_client().report(WrongSum(self._exchange.chip, step, among))
        if not finding.wrong:
            return
        wrong = [chips[rank] for rank in finding.wrong]
        if self._exchange.chip == next(chip for chip in chips if chip not in wrong):
            self._report(finding, wrong, step)
        if self._policy == STOP:
            self._stop_for(wrong, step)
        if self._policy == RESTORE:
            self.goes_back_to = self.right_until
        self._loop.accuse(wrong, right_until=self.goes_back_to)
        self._loop.recover(after=number)

    def _report(self, finding: Finding, wrong: Sequence[Chip], step: int) -> None:
        where, names = None, finding.parameters
        if finding.share is not None:
            share = self._shares.of(finding.share, self._exchange.members)
            where = share.start, share.stop
        for each in wrong:
            event = WrongResult(
                each,
                step,
                where,
                self.right_until,
                self._exchange.chip,
                parameters=names[:MOST_NAMES],
                n_parameters=len(names),
            )
            coordinator_client().report(event)

    def _stop_for(self, wrong: Sequence[Chip], step: int) -> None:
        """End the job, because chips have computed wrong numbers."""
        coordinator_client().flush()
        with suppress(TransportError):  # nobody ends the job before the event is sent
            self._exchange.gather_numbers([step])
        self.set_aside()
        right_until = self.right_until
        since = "" if right_until is None else f"; all were right until step {right_until}"
        raise WrongResultError(
            f"chips {', '.join(map(str, wrong))} computed wrong numbers in step {step}{since}, and "
            "the job was told to stop; repair them, and go on with --resume"
        )

    def set_aside(self) -> None:
        """Let no job read the checkpoints that may hold wrong numbers."""
        if self._exchange.chip == self._exchange.members[0] and self.right_until is not None:
            self._saving.set_aside(self.right_until)

    def restored(self, step: int) -> None:
        """Note that this chip has the state of a checkpoint; later ones may be wrong."""
        if self.goes_back_to is None:
            return
        self._saving.set_aside(step)
        self.took_state(step)

    def took_state(self, right_until: int | None) -> None:
        """Note that this chip has another state, which is known to be right up to a step."""
        if self._checks is not None:
            self._checks.go_back(right_until)

    def _mend(self, step: int, holders: Sequence[Chip]) -> None:
        """Give the state of some chips to all others, in the middle of a step."""
        self._learner.undo()  # what this step has changed is in no state
        self._loop.give_state(step, holders)
