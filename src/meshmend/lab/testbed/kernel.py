"""Enters network namespaces and runs `ip` and `tc` in them.

Knows processes and namespaces, nothing of meshes. Chips are numbers. The holder keeps the
namespace of each chip open; it is reached through `/proc`.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meshmend.errors import TestbedError
from meshmend.lab.testbed import agent
from meshmend.lab.testbed import holder as holder_module
from meshmend.lab.testbed.holder import FIRST_NAMESPACE

_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # users lack sbin on Debian
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
_DOWN_WITHIN_S = 10.0
_MOST_PROCESSES = 64  # at a time, each with two pipes


def command_path(name: str) -> str:
    """Return the full path of a system command.

    Raises:
        TestbedError: it is not installed.
    """
    path = shutil.which(name, path=_PATH)
    if path is None:
        package = _PACKAGES[name]
        raise TestbedError(
            f"a testbed needs the command {name}, but it is not installed; "
            f"install it with: apt-get install {package}"
        )
    return path


def start_holder(n_chips: int, record: Path) -> tuple[int, bool]:
    """Start the process that keeps the namespaces; return its process id and `is_user`.

    `is_user` says that it needed a user namespace, without root. It ends with the calling process
    unless `disown` is called.

    Raises:
        TestbedError: the kernel refuses namespaces; the message says why.
    """
    reader, writer = os.pipe()
    script = [sys.executable, "-I", "-S", str(holder_module.__file__)]
    arguments = [str(n_chips), str(os.getpid()), str(record)]
    # Not subprocess: the holder may outlive the object that would wait for it.
    try:
        process = os.posix_spawn(
            sys.executable,
            script + arguments,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)],
            setsid=True,
        )
    except OSError as error:
        os.close(reader)
        raise TestbedError(f"a testbed cannot start {sys.executable}: {error.strerror}") from None
    finally:
        os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.readline().strip()
    if said.startswith("ready "):
        return process, said == "ready user"
    os.waitpid(process, 0)
    raise TestbedError(
        f"a testbed needs network namespaces, but the kernel says: {said or 'nothing'}; run as "
        "root (CAP_SYS_ADMIN), or allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.apparmor_restrict_unprivileged_userns)"
    )


def disown(holder: int) -> None:
    """Let a holder outlive this process."""
    os.kill(holder, signal.SIGUSR1)


def stop_holder(holder: int) -> None:
    """End a holder, and so everything of its testbed; return when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        watch = os.pidfd_open(holder)
        poller = select.poll()
        poller.register(watch, select.POLLIN)
        os.kill(holder, signal.SIGTERM)
        if not poller.poll(1000 * _DOWN_WITHIN_S):
            os.kill(holder, signal.SIGKILL)
            poller.poll()
        os.close(watch)
    with contextlib.suppress(ChildProcessError):  # it is our child only if we made the testbed
        os.waitpid(holder, 0)


def namespace_path(holder: int, chip: int) -> str:
    """Return a path to the network namespace of a chip, for `nsenter --net=` or `open`."""
    return f"/proc/{holder}/fd/{FIRST_NAMESPACE + chip}"


def inside(holder: int, chip: int, *, is_user: bool, argv: Sequence[str]) -> list[str]:
    """Return the command line that runs a command on a chip."""
    user = ["--preserve-credentials", f"--user=/proc/{holder}/ns/user"] if is_user else []
    network = f"--net={namespace_path(holder, chip)}"
    return [command_path("nsenter"), *user, network, "--", *argv]


def enter(holder: int, chip: int, *, is_user: bool) -> None:
    """Move the calling process to a chip's network; call it in a child that was just forked.

    Raises:
        TestbedError: the process has several threads, or the testbed is gone.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    paths = [f"/proc/{holder}/ns/user"] if is_user else []
    for path in (*paths, namespace_path(holder, chip)):
        try:
            namespace = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise TestbedError(f"cannot enter {path}: {error.strerror}") from None
        failed = libc.setns(namespace, 0)
        os.close(namespace)
        if failed:
            raise TestbedError(
                f"cannot enter {path}: {os.strerror(ctypes.get_errno())}; "
                "enter from a child that was just forked and has one thread"
            )


def run_batches(holder: int, tool: str, batches: Mapping[int, str], *, is_user: bool) -> None:
    """Run one batch of `ip` or `tc` commands on each chip, many chips at once.

    Raises:
        TestbedError: a command failed; the message has the command and the kernel's reason.
    """
    path = command_path(tool)
    todo = [(chip, batch) for chip, batch in batches.items() if batch]
    for start in range(0, len(todo), _MOST_PROCESSES):
        wave = [
            (_start(inside(holder, chip, is_user=is_user, argv=[path, "-batch", "-"])), batch)
            for chip, batch in todo[start : start + _MOST_PROCESSES]
        ]
        # Every process is waited for, so that none is left when one of them failed.
        results = [(process.communicate(batch)[1], process, batch) for process, batch in wave]
        for errors, process, batch in results:
            if process.returncode:
                raise TestbedError(_failure(tool, errors, batch))


def run_change(holder: int, batches: Mapping[int, str], *, is_user: bool) -> None:
    """Change links and routes of a live network, from one thread for all chips.

    Raises:
        TestbedError: the kernel refused a command.
    """
    work = {namespace_path(holder, chip): batch for chip, batch in batches.items()}
    if is_user:
        argv = [sys.executable, "-I", "-S", str(agent.__file__)]
        process = _start(inside(holder, 0, is_user=True, argv=argv))
        said = process.communicate(json.dumps(work))[1]
    else:
        # A thread has its own network namespace, which ends with it: this process stays in its own.
        with ThreadPoolExecutor(max_workers=1) as threads:
            said = "\n".join(threads.submit(agent.change_all, work).result())
    if said:
        raise TestbedError(f"the kernel refused a change: {' '.join(said.split())}")


def _start(argv: Sequence[str]) -> "subprocess.Popen[str]":
    """Start a command that Ctrl-C does not reach, so that no network is left half changed."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _failure(tool: str, errors: str, batch: str) -> str:
    said = " ".join(line.strip() for line in errors.splitlines() if line.strip())
    at = re.search(r"Command failed -:(\d+)", said)
    line = batch.splitlines()[int(at[1]) - 1] if at else "-batch"
    return (
        f"the testbed needs a kernel with veth, bridge and tbf, but '{tool} {line}' failed: {said}"
    )
