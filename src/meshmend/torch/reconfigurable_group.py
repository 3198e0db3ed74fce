"""A process group that is made again on other chips, as PyTorch means it (torch 2.14 and newer).

    dist.init_process_group("meshmend", enable_reconfigure=True)
    handle = dist._get_reconfigure_handle()  # the ranks exchange these by themselves
    dist._reconfigure(uuid, handles).wait()

A handle is a text that says which chip of which mesh and job a rank is. So the handles alone tell
the mesh: chips without a handle are its holes. Handles are checked on every rank, before anything
else happens; what is refused leaves the group as it was. The ranks then meet in the store, under
the uuid, and only then leave what they had. Each writes one value there, with its address, and
reads those of the others. They connect when a collective first needs it; Gloo connects after that.
"""

import hashlib
import hmac
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Annotated, Any, Final

import msgspec
import torch

from meshmend import __version__
from meshmend.config import CHIP
from meshmend.errors import MeshmendError, ReconfigureError, StalledError
from meshmend.planning.environment import Environment
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip, format_chip, parse_failure
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh
from meshmend.torch.call_arguments import dist
from meshmend.torch.device_backend import MeshmendBackend
from meshmend.torch.group import MeshmendGroup
from meshmend.torch.late_gloo import LateGloo
from meshmend.torch.progress_thread import Rest
from meshmend.torch.transports import (
    NO_DEVICE,
    NoTransport,
    SocketTensorTransport,
    TensorTransport,
    listening_transport,
    transport_of,
)
from meshmend.transport.listener import Address
from meshmend.transport.tasks import Task

_log = logging.getLogger("meshmend.torch")

_NO_HANDLE: Final = "reconfigure needs handles of the backend meshmend, but got"
_SHOWN: Final = 60  # characters of a text that is no handle

Word = Annotated[str, msgspec.Meta(max_length=_SHOWN, pattern=r"^[ -~]*\Z")]  # can be printed
Place = Annotated[Chip, msgspec.Meta(max_length=_SHOWN)]


class GroupHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rank this is: its chip, its mesh without its chips' failures, its job."""

    version: Word  # of meshmend: ranks must make the same plans
    job: str
    shape: Word
    wrap: Word
    links: tuple[Word, ...]  # that failed, as far as this rank knows
    chip: Place
    token: str  # another one after every reconfigure: a handle is of one use


class _Arrival(msgspec.Struct):
    """What a rank tells the others when it comes to a reconfigure, or why it does not."""

    digest: str = ""  # of all handles in their order
    address: Address | None = None  # of its listener, if the group runs on sockets
    token: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)  # of this one try
    error: str = ""  # of this rank, which does not come, or waits no longer


class _Versioned(msgspec.Struct):
    version: Word


def parse_handles(texts: Sequence[str], mine: str) -> list[GroupHandle]:
    """Return what the handles of a group say; `mine` is that of this rank.

    Raises:
        ReconfigureError: they are not those of one handle for each of some chips of this job, of
            which this rank is one.
    """
    handles = [_parsed(text) for text in texts]
    own = _parsed(mine)
    first_of: dict[Chip, int] = {}
    for at, handle in enumerate(handles):
        chip = format_chip(handle.chip)
        if handle.job != own.job:
            raise ReconfigureError(
                f"reconfigure needs handles of one job, but handle {at} (chip {chip}) is of another"
            )
        if (handle.shape, handle.wrap) != (own.shape, own.wrap):
            raise ReconfigureError(
                f"reconfigure needs handles of one mesh, but handle {at} (chip {chip}) is of "
                f"{handle.shape} wrap {handle.wrap}, and this rank of {own.shape} wrap {own.wrap}"
            )
        if (before := first_of.setdefault(handle.chip, at)) != at:
            raise ReconfigureError(
                f"reconfigure needs one handle for each chip, but handles {before} and {at} are "
                f"both of chip {chip}"
            )
    if mine not in texts:
        raise ReconfigureError(
            f"reconfigure needs this rank's own handle among the {len(texts)}, but chip "
            f"{format_chip(own.chip)} has none; take it from _get_reconfigure_handle() after the "
            "last reconfigure"
        )
    return handles


def mesh_of(handles: Sequence[GroupHandle]) -> Mesh:
    """Return the mesh of the chips that have a handle; all others are holes.

    Raises:
        ReconfigureError: the chips are not connected, or no chips of such a mesh.
    """
    first = handles[0]
    chips = {handle.chip for handle in handles}
    try:
        whole = parse_mesh(first.shape, wrap=first.wrap)
        links = (parse_failure(link) for handle in handles for link in handle.links)
        if outside := sorted(chip for chip in chips if chip not in whole):
            raise ReconfigureError(
                f"reconfigure needs chips of the mesh {whole}, but got chip "
                f"{format_chip(outside[0])}"
            )
        holes = frozenset(itertools.product(*map(range, whole.shape))) - chips
        mesh = replace(whole, failed=holes).without(*links)
    except ReconfigureError:
        raise
    except MeshmendError as error:
        raise ReconfigureError(f"reconfigure needs handles of a mesh, but: {error}") from None
    if not mesh_figures(mesh).is_connected:
        raise ReconfigureError(
            f"reconfigure needs chips that are connected, but those of its {len(handles)} handles "
            f"are not: {mesh}"
        )
    return mesh


class ReconfigurableGroup(MeshmendGroup):
    """One rank of a group that `reconfigure` makes, and makes again; before, it has no peers."""

    supports_reconfigure = True
    supports_abort_hooks = True

    def __init__(self, options: Any, settings: Settings) -> None:
        # It is never connected, and refuses what runs on Gloo before the first reconfigure.
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", options.store),
            options.group_rank,
            options.group_size,
            timeout=options.timeout,
            enable_reconfigure=True,
        )
        self._chip = _chip_of(options, settings.mesh)
        self._mesh = settings.mesh
        self._hooks: dict[int, Callable[[], None]] = {}
        super().__init__(options, settings, gloo, NoTransport())
        # The first to come names the job; who comes to its store later takes part in it.
        self._job = _first_in(options.store, "meshmend-job")
        self._secret = (settings.secret or _first_in(options.store, "meshmend-secret")).encode()
        self._token = uuid.uuid4().hex
        self._making = threading.Lock()  # held while this rank meets the others
        self._backend: MeshmendBackend | None = None

    def get_backend(self, device: Any) -> Any:
        """Return this group as a backend; it stays right when the group is made again."""
        if self._backend is None:
            self._backend = MeshmendBackend(self)
        return self._backend

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call a function first when this rank aborts the group."""
        self._hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forget a function that `register_abort_hook` was given."""
        self._hooks.pop(hook_id, None)

    def abort(self) -> None:
        """Make every collective under way fail at once, on every rank, until a reconfigure."""
        for hook in list(self._hooks.values()):
            hook()
        super().abort()

    def get_reconfigure_handle(self) -> str:
        """Return what the other ranks need to know of this one."""
        words = mesh_words(replace(self._mesh, failed=frozenset()))
        handle = GroupHandle(
            version=__version__,
            job=self._job,
            shape=words["shape"],
            wrap=words["wrap"],
            links=tuple(words["fail"]),
            chip=self._chip,
            token=self._token,
        )
        return msgspec.json.encode(handle).decode()

    def reconfigure(self, opts: Any) -> Any:
        """Make the group one of the ranks with these handles; a list gives the order of ranks.

        If it fails, the group is as it was.

        Raises:
            ReconfigureError: the handles do not fit, the uuid was used before, or another thread
                is making the group again.
            StalledError: a rank did not come in time.
            StoppedError: the group was destroyed, or made in the process that forked this one.
        """
        self._progress.check("reconfigure")
        meeting = dist.PrefixStore(f"reconfigure/{opts.uuid}", self._store)
        try:
            with self._alone():
                return self._made_again(opts, meeting)
        except MeshmendError as error:
            # Else the others would wait for this rank. What it has told them already stays.
            with suppress(RuntimeError):  # the store may be gone
                meeting.compare_set(_key(self._chip), "", _written(_Arrival(error=str(error))))
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._making.acquire(blocking=False):
            raise ReconfigureError(
                "reconfigure needs to be called by one thread at a time, but another one of this "
                "rank waits in it; wait until that has ended, and take a new handle"
            )
        try:
            yield
        finally:
            self._making.release()

    def _made_again(self, opts: Any, meeting: Any) -> Any:
        is_ordered = not isinstance(opts.handles, set | frozenset)
        texts, mine = list(opts.handles), self.get_reconfigure_handle()
        handles = parse_handles(texts, mine)
        mesh = mesh_of(handles)
        if not is_ordered:
            by_chip = sorted(zip(handles, texts, strict=True), key=lambda both: both[0].chip)
            handles, texts = [handle for handle, _ in by_chip], [text for _, text in by_chip]
        settings = msgspec.structs.replace(self.settings, mesh=mesh)
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        place = SimpleNamespace(
            meeting=meeting,
            store=dist.PrefixStore(digest, meeting),
            group_rank=texts.index(mine),
            group_size=len(handles),
            timeout=opts.timeout or self.options._timeout,
        )
        chips = tuple(handle.chip for handle in handles)
        transport = self._met(place, opts.uuid, digest, settings, chips)
        old_transport, old_gloo = self._transport, self._late
        self._rank, self._size = place.group_rank, place.group_size
        self._token = uuid.uuid4().hex
        self._use(settings, transport, self._rank)
        old_transport.interrupt()  # what is under way there fails

        def leave() -> None:
            old_transport.close()
            if old_gloo is not None:
                old_gloo.close()

        self._late = LateGloo(
            dist.PrefixStore("gloo", place.store),
            self._rank,
            self._size,
            self.options._timeout,
            first=leave,
        )
        is_on_gloo = transport.device_type == NO_DEVICE
        if is_on_gloo and self._rank == 0:
            _log.warning("the group runs on Gloo: its ranks are not in the order of its chips")
        ready = self._wait_for_gloo if is_on_gloo else _do_nothing
        return self._progress.submit(f"reconfigure {opts.uuid} on rank {self._rank}", ready, [])

    def _met(
        self, place: Any, number: int, digest: str, settings: Settings, chips: tuple[Chip, ...]
    ) -> TensorTransport:
        """Return the transport of the new group when all of its ranks are here."""
        has_order = chips == settings.mesh.live
        if not has_order or settings.transport != "sockets":
            self._meet(place, number, _Arrival(digest), chips, settings.mesh)
            if not has_order:
                return NoTransport()
            return transport_of(settings, chips, place.store, place.group_rank, place.timeout)
        # Calls for a group that was left already prove another secret.
        secret = hmac.digest(self._secret, f"{number} {digest}".encode(), "sha256")
        listening = listening_transport(place.group_rank, chips, settings, secret)
        try:
            arrived = _Arrival(digest, listening.address)
            arrivals = self._meet(place, number, arrived, chips, settings.mesh)
        except BaseException:
            listening.close()
            raise
        addresses = {at: each.address for at, each in enumerate(arrivals) if each.address}
        return SocketTensorTransport(listening, addresses, secret)

    def _meet(
        self, place: Any, number: int, mine: _Arrival, chips: Sequence[Chip], mesh: Mesh
    ) -> list[_Arrival]:
        """Return what the ranks say when all are here, each with the same handles."""
        store, timeout = place.meeting, place.timeout
        keys, written = [_key(chip) for chip in chips], _written(mine)
        my_key = keys[place.group_rank]
        if bytes(store.compare_set(my_key, "", written)).decode() != written:
            raise ReconfigureError(
                f"reconfigure needs a new uuid each time, but {number} was already used; give all "
                "ranks another, and the same handles"
            )
        # While the others come, what was called so far is planned: most jobs call it again.
        if chips == mesh.live:
            self._catalogue.plan_alike(mesh)
        arrivals: list[_Arrival] = []
        # Rank 0 first: if it used this uuid before, its value is there at once.
        for wanted in filter(None, (keys[:1], keys[1:])):
            try:
                store.wait(wanted, timeout)
            except RuntimeError:  # a file's store knows no better word for a timeout
                missing = [
                    format_chip(chip)
                    for chip, key in zip(chips, keys, strict=True)
                    if not store.check([key])
                ]
                if missing:  # else the last has come just now
                    error = StalledError(
                        f"reconfigure {number} of {len(keys)} ranks waited "
                        f"{timeout.total_seconds():g} s for chip {'; '.join(missing)}; leave out "
                        "handles of chips that are gone"
                    )
                    store.set(my_key, _written(_Arrival(error=str(error))))
                    raise error from None
            told = store.multi_get(wanted)  # one trip to the store, not one for each rank
            arrivals += [msgspec.json.decode(each, type=_Arrival) for each in told]
            for chip, each in zip(chips, arrivals, strict=False):
                if each.error:
                    raise ReconfigureError(
                        f"reconfigure {number} has failed on chip {format_chip(chip)}: {each.error}"
                    )
                if each.digest != mine.digest:
                    raise ReconfigureError(
                        "reconfigure needs the same handles in the same order on every rank, but "
                        f"chip {format_chip(chip)} gave others, or {number} was already used; "
                        "agree on the handles, and on another uuid"
                    )
        return arrivals

    def _wait_for_gloo(self) -> None:
        """Wait until Gloo is connected."""
        self._gloo.rank()

    def _start(self, task: Task, flat: torch.Tensor, timeout: timedelta) -> Rest:
        """Start a task in place; after the first one, it is time for Gloo to connect."""
        wait, late = super()._start(task, flat, timeout), self._late
        assert late is not None

        def rest() -> None:
            wait()
            late.want()

        return rest


def _chip_of(options: Any, mesh: Mesh) -> Chip:
    """Return the chip of this process: its launcher says which, or else its rank does."""
    if (chip := Environment.from_environment(os.environ).chip) is not None:
        return chip
    if mesh.n_live != options.group_size:
        raise ReconfigureError(
            f"the backend meshmend needs one worker for each of the {mesh.n_live} live chips of "
            f"{mesh}, but the world size is {options.group_size}; start as many, or set {CHIP.name}"
        )
    return mesh.live[options.group_rank]


def _do_nothing() -> None:
    """Be ready at once: a collective connects to the peers that it needs."""


def _first_in(store: Any, key: str) -> str:
    """Return what the first rank to come wrote under a key: a random text."""
    return bytes(store.compare_set(key, "", uuid.uuid4().hex)).decode()


def _key(chip: Chip) -> str:
    """Return where a chip's arrival stands: it knows that also if it has no list of handles."""
    return f"here {format_chip(chip)}"


def _written(arrival: _Arrival) -> str:
    return msgspec.json.encode(arrival).decode()


def _parsed(text: str) -> GroupHandle:
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
    except (msgspec.DecodeError, RecursionError):
        raise ReconfigureError(f"{_NO_HANDLE} {text[:_SHOWN]!r}") from None
    if version != __version__:
        raise ReconfigureError(
            f"reconfigure needs handles of meshmend {__version__}, but got one of {version}; "
            "install one version on all hosts"
        )
    try:
        return msgspec.json.decode(text, type=GroupHandle)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ReconfigureError(f"{_NO_HANDLE} {text[:_SHOWN]!r}: {error}") from None
