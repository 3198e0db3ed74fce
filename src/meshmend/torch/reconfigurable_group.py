"""A process group that is made again on other chips, as PyTorch means it (torch 2.14 and newer).

    dist.init_process_group("meshmend", enable_reconfigure=True)
    handle = dist._get_reconfigure_handle()  # the ranks exchange these by themselves
    dist._reconfigure(uuid, handles).wait()

A handle is a text that says which chip of which mesh and job a rank is. So the handles alone tell
the mesh: chips without a handle are its holes. Handles are checked on every rank, before anything
else happens; what is refused leaves the group as it was. The ranks then meet in the store, under
the uuid, connect, and only then leave what they had.
"""

import hashlib
import itertools
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from meshmend import __version__
from meshmend.config import CHIP
from meshmend.errors import MeshmendError, ReconfigureError, StalledError
from meshmend.planning.environment import Environment
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip, parse_failure
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh
from meshmend.torch.call_arguments import dist
from meshmend.torch.device_backend import MeshmendBackend
from meshmend.torch.group import FINISH_S, MeshmendGroup
from meshmend.torch.transports import NoTransport, transport_of
from meshmend.torch.versions import bindings

_log = logging.getLogger("meshmend.torch")

_NO_HANDLE: Final = "reconfigure needs handles of the backend meshmend, but got"
_SHOWN: Final = 60  # characters of a text that is no handle


class GroupHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rank this is: its chip, its mesh without its chips' failures, its job, its Gloo."""

    version: str  # of meshmend: ranks must make the same plans
    job: str
    shape: str
    wrap: str
    links: tuple[str, ...]  # that failed, as far as this rank knows
    chip: Chip
    gloo: str


class _Versioned(msgspec.Struct):
    version: str


def parse_handles(texts: Sequence[str], mine: str) -> list[GroupHandle]:
    """Return what the handles of a group say; `mine` is that of this rank.

    Raises:
        ReconfigureError: they are not those of one handle for each of some chips of this job, of
            which this rank is one.
    """
    handles = [_parsed(text) for text in texts]
    own = _parsed(mine)
    for at, handle in enumerate(handles):
        chip = _words(handle.chip)
        if handle.job != own.job:
            raise ReconfigureError(
                f"reconfigure needs handles of one job, but handle {at} (chip {chip}) is of another"
            )
        if (handle.shape, handle.wrap) != (own.shape, own.wrap):
            raise ReconfigureError(
                f"reconfigure needs handles of one mesh, but handle {at} (chip {chip}) is of "
                f"{handle.shape} wrap {handle.wrap}, and this rank of {own.shape} wrap {own.wrap}"
            )
        before = next(i for i, other in enumerate(handles) if other.chip == handle.chip)
        if before != at:
            raise ReconfigureError(
                f"reconfigure needs one handle for each chip, but handles {before} and {at} are "
                f"both of chip {chip}"
            )
    if mine not in texts:
        raise ReconfigureError(
            f"reconfigure needs this rank's own handle among the {len(texts)}, but chip "
            f"{_words(own.chip)} has none; take it from _get_reconfigure_handle() after the last "
            "reconfigure"
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
                f"reconfigure needs chips of the mesh {whole}, but got chip {_words(outside[0])}"
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
        name = options.store.compare_set("meshmend-job", "", uuid.uuid4().hex)
        self._job = bytes(name).decode()
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
            gloo=self._gloo.get_reconfigure_handle(),
        )
        return msgspec.json.encode(handle).decode()

    def reconfigure(self, opts: Any) -> Any:
        """Make the group one of the ranks with these handles; a list gives the order of ranks.

        If it fails, the group is as it was.

        Raises:
            ReconfigureError: the handles do not fit, or the uuid was used before.
            StalledError: a rank did not come in time.
        """
        is_ordered = not isinstance(opts.handles, set | frozenset)
        texts, mine = list(opts.handles), self.get_reconfigure_handle()
        handles = parse_handles(texts, mine)
        mesh = mesh_of(handles)
        if not is_ordered:
            by_chip = sorted(zip(handles, texts, strict=True), key=lambda both: both[0].chip)
            handles, texts = [handle for handle, _ in by_chip], [text for _, text in by_chip]
        rank, timeout = texts.index(mine), opts.timeout or self.options._timeout
        store = dist.PrefixStore(f"reconfigure/{opts.uuid}", self._store)
        self._meet(store, opts.uuid, texts, rank, [handle.chip for handle in handles], timeout)
        settings = msgspec.structs.replace(self.settings, mesh=mesh)
        place = SimpleNamespace(
            store=store, group_rank=rank, group_size=len(handles), timeout=timeout
        )
        transport: Any = NoTransport()
        if tuple(handle.chip for handle in handles) == mesh.live:
            transport = transport_of(place, settings, mesh.live)
        elif rank == 0:
            _log.warning("the group runs on Gloo: its ranks are not in the order of its chips")
        try:
            self._reconfigure_gloo(opts.uuid, handles, timeout)
        except BaseException:
            transport.close()
            raise
        self._leave()
        self._use(settings, transport, rank)
        return self._progress.submit(f"reconfigure {opts.uuid} on rank {rank}", lambda: None, [])

    def _meet(
        self,
        store: Any,
        number: int,
        texts: Sequence[str],
        rank: int,
        chips: Sequence[Chip],
        timeout: timedelta,
    ) -> None:
        """Return when all ranks are here, each with the same handles."""
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        claimed = bytes(store.compare_set("claimed", "", digest)).decode()
        if claimed != digest or store.add(f"tries-{rank}", 1) > 1:
            raise ReconfigureError(
                f"reconfigure needs a new uuid each time, but {number} was already used; give all "
                "ranks another, and the same handles"
            )
        keys = [f"here-{peer}" for peer in range(len(texts))]
        store.set(keys[rank], "1")
        try:
            store.wait(keys, timeout)
        except RuntimeError:  # a file's store knows no better word for a timeout
            is_here = dict(zip(chips, (store.check([key]) for key in keys), strict=True))
            missing = [_words(chip) for chip in chips if not is_here[chip]]
            raise StalledError(
                f"reconfigure {number} of {len(texts)} ranks waited {timeout.total_seconds():g} s "
                f"for chip {'; '.join(missing)}; leave out handles of chips that are gone"
            ) from None

    def _reconfigure_gloo(
        self, number: int, handles: Sequence[GroupHandle], timeout: timedelta
    ) -> None:
        options = bindings.ReconfigureOptions()
        options.uuid, options.timeout = number, timeout
        options.handles = [handle.gloo for handle in handles]
        self._gloo.reconfigure(options)

    def _leave(self) -> None:
        """End what is under way on the present connections, and close them."""
        self._is_aborted = True
        self._transport.interrupt()
        self._progress.finish(FINISH_S)
        self._transport.close()


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


def _parsed(text: str) -> GroupHandle:
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
    except msgspec.DecodeError:
        raise ReconfigureError(f"{_NO_HANDLE} {text[:_SHOWN]!r}") from None
    if version != __version__:
        raise ReconfigureError(
            f"reconfigure needs handles of meshmend {__version__}, but got one of {version}; "
            "install one version on all hosts"
        )
    try:
        return msgspec.json.decode(text, type=GroupHandle)
    except msgspec.DecodeError as error:
        raise ReconfigureError(f"{_NO_HANDLE} {text[:_SHOWN]!r}: {error}") from None


def _words(chip: Chip) -> str:
    return ",".join(map(str, chip))
