"""A job under Slurm: its job file, and the commands that run inside its allocation.

The file asks for nodes, makes the job's secret, and runs `meshmend slurm-job` on the first node,
which runs the coordinator here and a step for each host (`supervised`). Host number k of those with
a live chip gets the k-th node. A node that is down for longer than Slurm's SlurmdTimeout leaves the
allocation for good. Its host then asks for a node of its own, with a job beside this one, which
waits in the queue until any node is free.
"""

import random
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from meshmend.config import JobConfig, command_words
from meshmend.errors import InputError
from meshmend.launch.hosts import (
    address_toward,
    board_from,
    host_shape_from,
    is_coordinator_answering,
    live_chips_of,
    live_host_blocks,
)
from meshmend.launch.slurm_watch import (
    AgentLine,
    SupervisorBeat,
    ask_slurm,
    read_agent_line,
    record_in,
)
from meshmend.launch.supervisor import (
    Child,
    Ending,
    HangProbe,
    KeptProcess,
    ProcessSpec,
    RestartPolicy,
    Supervisor,
    say,
)
from meshmend.membership.record_file import load_history
from meshmend.topology.failures import Block, format_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import configured_mesh
from meshmend.transport.handshake import secret_in

_POLL_S: Final = 0.1
_SILENT_S: Final = 5.0  # without a line of its agent a step counts as dead
_LAST_STEPS_S: Final = 20.0  # for the steps to end by themselves once the job is over
_GAVE_UP: Final = 1  # the exit code of an agent that no restart helps
_OVER: Final = frozenset([0, 1, 2])  # exit codes of a coordinator that is not to be started again
# The longest wait is also how late a step may be when its node is back. An agent that gives up has
# tried as often.
_POLICY: Final = RestartPolicy(first_s=0.2, longest_s=3.0, most_failures=5, gave_up_s=60.0)
_FOR_EVER_S: Final = 1e9  # a job beside this one may wait in the queue for long
_PORTS: Final = range(10_000, 32_768)  # below those that Linux gives to outgoing connections
_LOOPBACK: Final = "127."
_PREFIXES: Final = ("SLURM_", "SLURMD_", "PMI_", "PMIX_")  # of variables of an allocation
_ONE_TASK: Final = ("--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--unbuffered")
_SAME_AS_JOB: Final = {
    "SLURM_JOB_PARTITION": "--partition",
    "SLURM_JOB_ACCOUNT": "--account",
    "SLURM_JOB_QOS": "--qos",
    "SLURM_CPUS_PER_TASK": "--cpus-per-task",
}
_TIME: Final = re.compile(r"(\d+-)?\d+(:\d+){1,2}")  # days-hours:minutes:seconds
_OF_BATCH_SCRIPT: Final = re.compile(
    r"(?:--(?:output|error|open-mode|nodes|ntasks|job-name|dependency|array|begin|mail|requeue"
    r"|no-requeue|signal|nodelist|exclude|no-kill|input)|-[oeNnJdabwxki])"
)


@dataclass(frozen=True)
class SlurmJob:
    """A job as the job file describes it: its settings, and the script with its arguments."""

    config: JobConfig
    script: tuple[str, ...]
    is_module: bool = False

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the job."""
        return configured_mesh(self.config.mesh)

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The block of chips of one host."""
        return host_shape_from(self.config.hosts.block, self.mesh)

    @cached_property
    def run_dir(self) -> Path:
        """The folder of the job, which all nodes see."""
        return Path(self.config.job.run_dir).absolute()

    @cached_property
    def of_processes(self) -> JobConfig:
        """The settings of its coordinator and agents, which may run in another folder."""
        board = board_from(self.config.mesh.board or format_shape(self.hosts), self.mesh)
        paths = {"job.run_dir": str(self.run_dir)}
        paths["job.secret_file"] = str(Path(self.config.job.secret_file).absolute())
        return self.config.with_({"mesh.board": format_shape(board), "hosts.block": "", **paths})

    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks of the hosts that have a live chip: those that need a node."""
        return live_host_blocks(self.mesh, self.hosts)


@dataclass(frozen=True)
class Allocation:
    """What Slurm tells the batch script of a job: its number, its nodes, and where it runs."""

    job_id: str
    nodes: tuple[str, ...]
    address: str
    environment: Mapping[str, str]

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Allocation":
        """Return the allocation of the batch script in which this process runs.

        Raises:
            InputError: this is no batch script, or Slurm does not answer.
        """
        job_id, node_list = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
        if not job_id or not node_list:
            raise InputError(
                "meshmend slurm-job needs to run in a job file, but SLURM_JOB_ID and "
                "SLURM_JOB_NODELIST are not set; make a job file with: meshmend submit slurm"
            )
        nodes = tuple(ask_slurm("scontrol", "show", "hostnames", node_list).split())
        here = environment.get("SLURMD_NODENAME") or nodes[0]
        return cls(job_id, nodes, _own_address(here, nodes), environment)

    def has(self, node: str) -> bool:
        """Whether a node is still part of the allocation; True if Slurm does not answer."""
        with suppress(InputError):
            answer = ask_slurm("squeue", "--noheader", f"--jobs={self.job_id}", "--format=%N")
            return node in ask_slurm("scontrol", "show", "hostnames", answer.strip()).split()
        return True

    def time_left(self) -> str | None:
        """Return how long the job may still run, as `--time` takes it; None without a limit."""
        with suppress(InputError):
            left = ask_slurm("squeue", "--noheader", f"--jobs={self.job_id}", "--format=%L").strip()
            return left if _TIME.fullmatch(left) else None
        return None

    def beside_name(self, name: str) -> str:
        """Return the name of the job beside this one that replaces a host's node."""
        return f"meshmend-{self.job_id}-{_title(name)}"

    def kill_step(self, name: str) -> None:
        """End what is left of a step, and of the job beside this one that replaced its node."""
        with suppress(InputError):
            rows = ask_slurm(
                "squeue", "--steps", "--noheader", f"--jobs={self.job_id}", "--format=%i %j"
            )
            for row in rows.splitlines():
                step_id, _, title = row.strip().partition(" ")
                if title == _title(name):
                    ask_slurm("scancel", "--signal=KILL", step_id)  # SIGTERM only makes it save
        self.cancel_beside([name])

    def cancel_beside(self, names: Sequence[str]) -> None:
        """Cancel the jobs beside this one that replace the nodes of these steps."""
        with suppress(InputError):
            ask_slurm("scancel", "--me", f"--name={','.join(map(self.beside_name, names))}")


@dataclass(frozen=True)
class StepCommand:
    """A command that runs an agent; it is dead if no line comes for `starts_within_s` at first."""

    command: Sequence[str]
    environment: Mapping[str, str]
    starts_within_s: float = 300.0


@dataclass(frozen=True)
class SupervisedJob:
    """The commands of a job, each asked for at every start.

    The command of a step may change: a node that was down for long is no longer part of the job's
    allocation. A coordinator that is started again has other options than the first.
    `is_answered()` says whether the coordinator answers; one that hangs is killed.
    `kill(name)` ends what is left of a step whose process was killed. `beat()` is called several
    times a second while the job runs, and then `on_over()`.
    """

    coordinator: Callable[[], Sequence[str]]
    steps: Mapping[str, Callable[[], StepCommand]]
    kill: Callable[[str], None] = lambda name: None
    is_answered: Callable[[], bool] = lambda: True
    beat: Callable[[], None] = lambda: None
    on_over: Callable[[], None] = lambda: None


def supervise(job: SupervisedJob) -> int:
    """Run a job until its coordinator ends; return the coordinator's exit code.

    What dies before that is started again. Gives up, with exit code 1, when every step has failed
    several times in a row, or its agent has given up. On an exception, such as SIGTERM, all
    processes are ended before it is passed on.
    """
    supervisor = Supervisor()

    def start_coordinator() -> Child:
        process = supervisor.spawn(job.coordinator())
        process.probe = HangProbe(job.is_answered, time.monotonic())
        return process

    coordinator = supervisor.keep(
        ProcessSpec("the coordinator", start_coordinator, _judge_coordinator, _POLICY)
    )
    steps = [_Step(job, name, supervisor).kept for name in job.steps]
    try:
        try:
            code = _until_over(job, supervisor, coordinator, steps)
        finally:
            job.on_over()
        deadline = time.monotonic() + _LAST_STEPS_S
        while any(step.is_running for step in steps) and time.monotonic() < deadline:
            supervisor.serve(_POLL_S)
        return code
    finally:
        supervisor.end_all()


def _until_over(
    job: SupervisedJob,
    supervisor: Supervisor,
    coordinator: KeptProcess,
    steps: Sequence[KeptProcess],
) -> int:
    """Start and restart processes until the coordinator ends; return its exit code."""
    while not coordinator.is_done:
        job.beat()
        # Lines are read first: this process itself may have been held up, not the agents.
        supervisor.serve(_POLL_S)
        supervisor.restart_due()
        if all(step.has_given_up for step in steps):
            say("every step has failed again and again; the job ends")
            return 1
    assert coordinator.child is not None
    return coordinator.child.code or 0


def _judge_coordinator(process: Child) -> Ending:
    return Ending.DONE if process.code in _OVER else Ending.FAILED


class _Step:
    """A step of a job: its agent's lines say that it lives, and how it ended."""

    def __init__(self, job: SupervisedJob, name: str, supervisor: Supervisor) -> None:
        self._command = job.steps[name]
        self._supervisor = supervisor
        self._exit_code: int | None = None  # of its agent
        self._silent_at = 0.0  # when it counts as dead, unless a line comes before
        spec = ProcessSpec(name, self._start, self._judge, _POLICY, lambda: job.kill(name))
        self.kept = supervisor.keep(spec)

    def _start(self) -> Child:
        what = self._command()
        self._silent_at = time.monotonic() + what.starts_within_s
        self._exit_code = None
        process = self._supervisor.spawn(what.command, what.environment, take=self._take)
        process.probe = self._probe
        return process

    def _take(self, line: bytes) -> bool:
        """Take note of a line of the agent; return False for any other line."""
        match read_agent_line(line):
            case AgentLine(exit_code=None):
                self._silent_at = time.monotonic() + _SILENT_S
            case AgentLine(exit_code=code):
                self._exit_code = code
            case None:
                return False
        return True

    def _probe(self, now: float) -> str:
        return "is silent, and counts as dead" if now > self._silent_at else ""

    def _judge(self, process: Child) -> Ending:
        if self._exit_code == 0:
            return Ending.DONE
        return Ending.GAVE_UP if self._exit_code == _GAVE_UP else Ending.FAILED


def supervised(job: SlurmJob, allocation: Allocation) -> SupervisedJob:
    """Return the commands of a job in its allocation.

    Raises:
        InputError: the allocation has too few nodes, its first node has no free port, or the
            secret cannot be used.
    """
    blocks = job.blocks()
    if len(allocation.nodes) < len(blocks):
        raise InputError(
            f"a mesh {format_shape(job.mesh.shape)} with hosts of {format_shape(job.hosts)} needs "
            f"{len(blocks)} nodes, but job {allocation.job_id} has {len(allocation.nodes)}; ask "
            f"for them with --nodes={len(blocks)}"
        )
    secret = secret_in(Path(job.of_processes.job.secret_file)).encode()
    slurm = job.config.slurm
    address = allocation.address, _free_port(allocation.address, slurm.port)
    endpoint = f"{address[0]}:{address[1]}"
    steps: dict[str, Callable[[], StepCommand]] = {}
    for block, node in zip(blocks, allocation.nodes, strict=False):
        parts = [Block((1,) * len(chip), chip) for chip in live_chips_of(block, job.mesh)]
        for part in parts if slurm.per_chip else [block]:
            name = f"{'chip' if slurm.per_chip else 'host'} {part}"
            agent = _agent(job, part, endpoint, allocation.job_id)
            steps[name] = _StepCommands(job, allocation, name, node, agent)
    if allocation.environment.get("SLURM_RESTART_COUNT"):
        allocation.cancel_beside(list(steps))  # those of the attempt before, whose node died

    beat = SupervisorBeat(job.run_dir)
    return SupervisedJob(
        _Coordinator(job, endpoint),
        steps,
        allocation.kill_step,
        lambda: is_coordinator_answering(address, secret),
        beat.write,
        beat.end,
    )


class _Coordinator:
    """Returns the command of the coordinator; until a generation has begun, that restarts a job."""

    def __init__(self, job: SlurmJob, endpoint: str) -> None:
        self._record = record_in(job.run_dir)
        self._job_name = job.config.job.name
        self._begun = self._begun_generations()
        self._command = _meshmend(
            "coordinator",
            *("--listen", endpoint, "--state", str(self._record)),
            *command_words("coordinator", job.of_processes),
        )

    def __call__(self) -> Sequence[str]:
        has_begun = self._begun_generations() != self._begun
        return self._command if has_begun else (*self._command, "--restarted")

    def _begun_generations(self) -> object:
        return load_history(self._record, self._job_name).record.begun


class _StepCommands:
    """Returns the command that runs an agent on a node, or beside this job if the node has left it.

    Slurm is asked whether it has left only after a step has died: a large job starts many steps.
    """

    def __init__(
        self, job: SlurmJob, allocation: Allocation, name: str, node: str, agent: Sequence[str]
    ) -> None:
        self._job, self._allocation = job, allocation
        self._name, self._node, self._agent = name, node, agent
        self._has_started = False

    def __call__(self) -> StepCommand:
        is_inside = not self._has_started or self._allocation.has(self._node)
        self._has_started = True
        return self._inside() if is_inside else self._beside()

    def _inside(self) -> StepCommand:
        environment = self._allocation.environment
        share: tuple[str, ...] = ("--mem=0",)
        if self._job.config.slurm.per_chip:
            n_cpus = environment.get("SLURM_CPUS_PER_TASK", "1")
            share = ("--exact", f"--cpus-per-task={n_cpus}")
        where = (f"--nodelist={self._node}", f"--job-name={_title(self._name)}")
        words = ("--overlap", "--no-kill", *where, *share, *_ONE_TASK)
        return StepCommand(("srun", *words, *self._agent), environment)

    def _beside(self) -> StepCommand:
        inside = self._allocation.environment
        outside = {
            key: text
            for key, text in inside.items()
            if not key.startswith(_PREFIXES) or key == "SLURM_CONF"
        }
        wanted: Sequence[str] = _for_srun(self._job.config.slurm.sbatch)
        same = [
            f"{option}={inside[key]}" for key, option in _SAME_AS_JOB.items() if inside.get(key)
        ]
        if left := self._allocation.time_left():  # not what its partition gives without a limit
            wanted = (*wanted, f"--time={left}")
        title = f"--job-name={self._allocation.beside_name(self._name)}"
        words = (*same, *wanted, title, *_ONE_TASK)
        return StepCommand(("srun", *words, *self._agent), outside, starts_within_s=_FOR_EVER_S)


def _title(name: str) -> str:
    """Return the name of a step as Slurm takes it: without blanks, and commas, which join names."""
    return name.replace(" ", "-").replace(",", ".")


def _agent(job: SlurmJob, chips: Block, endpoint: str, job_id: str) -> Sequence[str]:
    return _meshmend(
        "agent",
        *("--coordinator", endpoint, "--chips", str(chips), "--supervised", "--slurm-job", job_id),
        *command_words("agent", job.of_processes),
        *(["--module"] if job.is_module else []),
        *job.script,
    )


def _meshmend(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "meshmend", *words)


def _for_srun(extras: Sequence[str]) -> list[str]:
    """Return options of sbatch as words for srun, without those that are about the batch script."""
    lines = (line for line in extras if not _OF_BATCH_SCRIPT.match(line))
    return [word for line in lines for word in shlex.split(line)]


def _own_address(here: str, nodes: Sequence[str]) -> str:
    """Return the address by which the other nodes of a job reach this one.

    Many hosts resolve their own name to loopback. Then it is the address from which this node
    reaches another.

    Raises:
        InputError: Slurm does not answer, or a node's address cannot be found.
    """
    address = _address_of(here)
    if not address.startswith(_LOOPBACK):
        return address
    others = (_address_of(node) for node in nodes if node != here)
    return next((address_toward((each, 1)) for each in others if each[:4] != _LOOPBACK), address)


def _address_of(node: str) -> str:
    found = re.search(
        r"\bNodeAddr=(\S+)", ask_slurm("scontrol", "show", "node", node, "--oneliner")
    )
    name = found[1] if found else node
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise InputError(
            f"meshmend slurm-job needs the address of node {node}, but {name} has none: {error}"
        ) from None


def _free_port(address: str, wanted: int | None) -> int:
    """Return a port of this node on which nobody listens: the one that is wanted, if any.

    Raises:
        InputError: there is none, or the address is not one of this node.
    """
    why = "all ports are in use"
    for port in random.sample(_PORTS, 50) if wanted is None else [wanted]:
        try:
            with socket.create_server((address, port)):
                return port
        except OSError as error:
            why = error.strerror or str(error)
    which = "a port" if wanted is None else f"port {wanted}"
    raise InputError(
        f"the coordinator needs {which} of {address}, the address of its node in Slurm, but: {why}"
    )


_SUBMIT_S: Final = 60.0

_TEXT: Final = """#!/bin/bash
{directives}

# {made_by}
set -euo pipefail

# The folder of this job, on a file system that all nodes see: secret, record, ledgers and plans.
run={run}
mkdir -p "$run"
if [ ! -s "$run/secret" ]; then
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$run/secret")
fi

# It starts the coordinator here and one step per {what}, and starts again what dies. It ends with
# the exit code of the job.
meshmend=({program})
exec "${{meshmend[@]}}" slurm-job {options} \\
    --run-dir "$run" --secret-file "$run/secret" \\
    {script}
"""


def job_file(job: SlurmJob, made_by: str) -> str:
    """Return the text of a job file, which runs `meshmend slurm-job` on its first node.

    Without a folder in its settings, each submitted job has one of its own.

    Raises:
        InputError: the board does not fit, or the time limit or an option of sbatch is no such.
    """
    config, wanted = job.config, job.config.slurm
    _ = job.of_processes  # refuses a board that does not fit
    for option, text in (("--time", wanted.time), *(("--sbatch", each) for each in wanted.sbatch)):
        if not text.isprintable():
            raise InputError(f"{option} needs one line of printable text, but got {text!r}")
    for text in wanted.sbatch:
        if not re.match(r"--?[A-Za-z]", text):
            raise InputError(
                f"--sbatch needs an option of sbatch such as '--partition=long', but got {text!r}"
            )
    told = config.with_({"hosts.block": format_shape(job.hosts), "job.run_dir": ""})
    options = (*command_words("slurm-job", told), *(["--module"] if job.is_module else []))
    run_dir = config.job.run_dir
    return _TEXT.format(
        directives="\n".join(f"#SBATCH {directive}" for directive in _directives(job)),
        made_by=" ".join(made_by.splitlines()),
        run=shlex.quote(run_dir) if run_dir else '"runs/slurm-$SLURM_JOB_ID"',
        what="chip" if wanted.per_chip else "host",
        program=shlex.join(_meshmend()),
        options=shlex.join(options),
        script=shlex.join(job.script),
    )


def _directives(job: SlurmJob) -> Sequence[str]:
    wanted, script, blocks = job.config.slurm, job.script[0], job.blocks()
    name = script.rpartition(".")[2] if job.is_module else Path(script).stem
    n_tasks, n_cpus = 1, max(len(live_chips_of(block, job.mesh)) for block in blocks)
    if wanted.per_chip:
        n_tasks, n_cpus = n_cpus, 1
    return (
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]', '-', name)}",
        f"--nodes={len(blocks)}",
        f"--ntasks-per-node={n_tasks}",
        f"--cpus-per-task={n_cpus}",
        "--no-kill",  # the others go on when a node dies
        "--requeue",  # after preemption, or the death of the first node
        "--open-mode=append",  # a requeued job keeps its earlier output
        *([f"--time={wanted.time}"] if wanted.time else []),
        *wanted.sbatch,
    )


def submit(text: str) -> str:
    """Submit a job file with sbatch; return the number of the job.

    Raises:
        InputError: sbatch is not installed, or refuses the file.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, text=True, timeout=_SUBMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--run needs sbatch of Slurm, but: {error}") from None
    if done.returncode != 0:
        raise InputError(f"sbatch refuses the job file: {done.stderr.strip()}")
    return done.stdout.strip()
