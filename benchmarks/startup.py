"""How soon the command line answers a mistake in its arguments, next to `meshmend --help`.

    python benchmarks/startup.py [--no-write] [--runs 5]

Each command runs in a process of its own, in turns, so that a busy moment hits them alike. The
ratio is that of the medians of processor time, which hardly changes with what else the machine
does; the time on the clock stands beside it. None of these commands needs Numba or torch, so
each should take less than twice as long as the help. The exit code must be 2, with one line on
standard error.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from record import record

HELP = "--help"
MISTAKES = (
    "plan --mesh foo",
    "plan --mesh 4x4 --fail 9,9",
    "plan --mesh 4x4 --payload foo",
    "plan --mesh 4x4 --algorithm foo",
    "verify nowhere.json",
    "simulate --mesh 4x4 --payload foo",
    "simulate --mesh 4x4 --fabric foo",
    "show --mesh foo",
    "train --mesh foo",
    "train --inject foo",
    "run --mesh foo script.py",
    "run --mesh 4x4 nowhere.py",
    "bench --mesh 4x4 --payload foo",
    "coordinator --mesh foo --listen 127.0.0.1:7000",
    "worker --mesh foo --coordinator 127.0.0.1:7000 script.py",
    "testbed up --mesh foo --link 50Mbit",
    "reproduce --fabric foo",
)


def answer_s(line: str) -> tuple[float, float]:
    """Return what a command takes of processors and of the clock, having checked how it ends."""
    start, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "meshmend", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    clock_s, after = time.perf_counter() - start, os.times()
    worked_s = after.children_user + after.children_system
    worked_s -= before.children_user + before.children_system
    expected = (0, 0) if line == HELP else (2, 1)
    assert (done.returncode, done.stderr.count("\n")) == expected, (line, done.stderr)
    return worked_s, clock_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--runs", type=int, default=5, help="of each command")
    arguments = parser.parse_args()
    lines = (HELP, *MISTAKES)
    for line in lines:
        answer_s(line)  # reads the files into the page cache
    times: dict[str, list[tuple[float, float]]] = {line: [] for line in lines}
    for _ in range(arguments.runs):
        for line in lines:
            times[line].append(answer_s(line))
    help_s = statistics.median(worked_s for worked_s, _ in times[HELP])
    cases = []
    print(f"{'meshmend ...':<58} {'processor':>9} {'clock':>7} {'of help':>8}")
    for line in lines:
        processor_s, clock_s = map(statistics.median, zip(*times[line], strict=True))
        ratio = processor_s / help_s
        cases.append(
            {
                "command": line,
                "processor_s": round(processor_s, 3),
                "clock_s": round(clock_s, 3),
                "ratio_to_help": round(ratio, 3),
            }
        )
        print(f"{line:<58} {processor_s:>7.2f} s {clock_s:>5.2f} s {ratio:>7.2f}x")
    if not arguments.no_write:
        print(f"written {record('startup', {'runs': arguments.runs, 'cases': cases})}")


if __name__ == "__main__":
    main()
