"""The disks of a job: the coordinator's record, and the checkpoints that all workers share."""

from dataclasses import dataclass, field
from random import Random

from meshmend.errors import InputError
from meshmend.membership.record_file import history_of


@dataclass(frozen=True)
class State:
    """What a replica holds: a digest that names everything that went into it.

    `links` are the speeds of links that were found up to its step.
    """

    step: int
    position: int
    digest: int
    links: str = field(default="", compare=False)  # the invariants compare them

    def __len__(self) -> int:
        """Return how many bytes it takes to send this, were it more than a digest."""
        return 1


@dataclass
class Disk:
    """Files, as far as a job knows them; while it is full nothing is written."""

    record: str | None = None
    is_record_outdated: bool = False  # something was to be written after it, and was not
    is_record_spoilt: bool = False
    is_history_unknown: bool = False  # a spoilt record was read, and no generation has begun since
    is_full: bool = False
    is_slow: bool = False
    damaged: set[int] = field(default_factory=set)  # steps whose checkpoints cannot be read
    _record_before: str | None = None
    _shards: dict[tuple[int, int], dict[int, State]] = field(default_factory=dict)

    def write_record(self, text: str) -> None:
        """Keep a coordinator's record in the place of the one before.

        Raises:
            OSError: the disk is full.
        """
        if self.is_full:
            self.is_record_outdated = True
            raise OSError("no space")
        self._record_before = self.record
        self.is_record_spoilt = False
        self.record, self.is_record_outdated = text, False

    def spoil_record(self, how: str, random: Random) -> None:
        """Make of the record what a bad disk does: tear it, flip a bit, or lose the last write."""
        if not self.record:
            return
        at = random.randrange(len(self.record))
        self.is_record_spoilt = how != "lost"
        match how:
            case "torn":
                self.record = self.record[:at]
            case "rotten":
                self.record = _with_flipped_bit(self.record, random)
            case "lost":
                self.record, self.is_record_outdated = self._record_before, True

    @property
    def term(self) -> int:
        """The term of the coordinator's record, 0 if there is none that can be read."""
        if self.record is None:
            return 0
        return history_of(self.record, "job").record.term

    def save(self, state: State, *, shard: int, n_shards: int) -> None:
        """Write a worker's part of a checkpoint.

        Raises:
            InputError: the disk is full.
        """
        if self.is_full:
            raise InputError(f"cannot write the checkpoint of step {state.step}: no space")
        self._shards.setdefault((state.step, n_shards), {})[shard] = state

    def set_aside(self, after: int) -> None:
        """Let nobody read the checkpoints after a step."""
        self._shards = {key: found for key, found in self._shards.items() if key[0] <= after}

    def complete_steps(self) -> list[int]:
        """Return the steps of which all shards of one count are there."""
        return sorted({step for (step, n), found in self._shards.items() if len(found) == n})

    def load(self, step: int) -> State | None:
        """Return the state of a step, or None if it cannot be read."""
        if step in self.damaged:
            return None
        sets = [
            list(found.values())
            for (at, n_shards), found in self._shards.items()
            if at == step and len(found) == n_shards
        ]
        return next((states[0] for states in sets if len(set(states)) == 1), None)


def _with_flipped_bit(text: str, random: Random) -> str:
    """Return a text with one flipped bit; often one that makes another number of a number."""
    at, bit = random.randrange(len(text)), random.randrange(8)
    if random.random() < 0.7:
        at, bit = random.choice([at for at, each in enumerate(text) if each.isdigit()] or [at]), 0
    return text[:at] + chr(ord(text[at]) ^ 1 << bit) + text[at + 1 :]
