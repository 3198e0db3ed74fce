"""The process that keeps a testbed's network namespaces alive: they vanish when it ends.

Run by path, so it imports the standard library only and starts in about 20 ms:

    python -I -S holder.py N_CHIPS OWNER RECORD

It makes one network namespace per chip, and keeps namespace k open as file descriptor
`FIRST_NAMESPACE + k`. Then it prints `ready root`, or `ready user` if it had to make a user
namespace first, and waits. If it cannot make them, it prints why and ends. Nothing is mounted and
nothing is named. So when it ends, in whatever way, the kernel removes namespaces, interfaces,
routes and queues.

It ends on SIGTERM, or when its owner ends. Then it kills what still runs in its namespaces and
removes the testbed's record. After SIGUSR1 it no longer ends with its owner.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType

FIRST_NAMESPACE = 100  # file descriptors below are Python's own
_CLONE_NEWUSER = 0x1000_0000
_CLONE_NEWNET = 0x4000_0000

# X-Y routes are asymmetric, hence no reverse-path filter; IPv6 would only send packets of its own.
_SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
}


def main(arguments: list[str]) -> int:
    """Keep the namespaces of one testbed until SIGTERM, or until its owner has ended."""
    n_chips, owner, record = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.closerange(
        3, os.sysconf("SC_OPEN_MAX")
    )  # a reader of an inherited pipe must not wait for us
    os.chdir("/")
    try:
        alive = os.pidfd_open(owner)
        is_user = _leave_network()
        _keep_namespaces(n_chips)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        print(f"{error.strerror}{where}", flush=True)
        return 1
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGUSR1, _disown)
    try:
        if os.getppid() == owner:
            print("ready user" if is_user else "ready root", flush=True)
            _detach_from_terminal()
            _wait_for(alive)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_members(n_chips)
        _remove(record)
    return 0


class _DisownedError(Exception):
    """The owner has signalled that the testbed may outlive it."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _disown(_signal: int, _frame: FrameType | None) -> None:
    raise _DisownedError


def _wait_for(owner: int) -> None:
    """Wait until the owner has ended; after SIGUSR1, wait until SIGTERM."""
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        poller.poll()
    except _DisownedError:
        while True:
            signal.pause()


def _leave_network() -> bool:
    """Leave the machine's network; return whether that needed a user namespace."""
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        return True
    return False


def _keep_namespaces(n_chips: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for chip in range(n_chips):
        _unshare(_CLONE_NEWNET)
        namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        os.dup2(namespace, FIRST_NAMESPACE + chip)
        os.close(namespace)
        for name, value in _SETTINGS.items():
            setting = Path("/proc/sys/net") / name  # those of the namespace just made
            if setting.exists():
                setting.write_text(value)


def _detach_from_terminal() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _kill_members(n_chips: int) -> None:
    """Kill every process in a namespace of the testbed, except this one and its owner."""
    ours = {os.fstat(FIRST_NAMESPACE + chip).st_ino for chip in range(n_chips)}
    deadline = time.monotonic() + 5
    while (members := _members(ours)) and time.monotonic() < deadline:
        for process in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _members(namespaces: set[int]) -> list[int]:
    spared = {os.getpid(), os.getppid()}
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in spared:
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino in namespaces:
                    members.append(int(entry.name))
    return members


def _remove(record: Path) -> None:
    """Remove the record, and its folder if that is empty and nobody is about to write there."""
    record.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder = os.open(record.parent, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record.parent.rmdir()


def _unshare(what: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
