"""`meshmend run --elastic`: runs a script that survives lost chips, and prints its events."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import note

if TYPE_CHECKING:
    from meshmend.launch.elastic_script import ElasticScript, ScriptResult
    from meshmend.membership.events import TimedEvent

ElasticOption = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="The script survives lost chips: it loops over a meshmend.train.Job or JaxJob, or "
        "over meshmend.torch.steps.",
    ),
]


def run_elastic_script(run: "ElasticScript") -> int:
    """Run a script through all faults; return 0 if it finished, else print why not."""
    from meshmend.cli.job_lines import job_line
    from meshmend.errors import TerminatedError
    from meshmend.launch.elastic_script import run_script
    from meshmend.launch.forked_worker import BAD_INPUT
    from meshmend.launch.termination import TERMINATED, terminable

    def show(timed: "TimedEvent") -> None:
        if line := job_line(timed):
            note(line)

    try:
        with terminable():
            result = run_script(run, show)
    except TerminatedError:
        return TERMINATED
    if not result.outcome.is_finished:
        what, _, trace = result.outcome.why.partition("\n")
        note(f"meshmend: the job did not finish: {what}")
        print(trace, end="", file=sys.stderr)
        return BAD_INPUT if result.outcome.is_refused else 1
    note(f"meshmend: {_summary(result)}")
    for words in (*result.audit.faults, *result.audit.unchecked):
        note(f"meshmend: {words}")
    if result.missing:
        steps = ", ".join(map(str, result.missing))
        note(f"meshmend: checkpoints that could not be written: of steps {steps}")
    if result.audit.without_ledger:
        note("meshmend: the script finished, but what it did could not be checked")
    if words := result.outcome.fewer_chips:
        note(f"meshmend: {words}")
    found = result.audit
    return int(bool(found.is_wrong or found.without_ledger or result.outcome.fewer_chips))


def _summary(result: "ScriptResult") -> str:
    found = result.audit
    if found.steps == 0 and result.n_done:
        return f"{result.n_done} steps; samples not checked; replicas not compared"
    if found.steps == 0 and found.resumed:
        return (
            f"finished: {found.resumed} of {found.resumed} steps were done before this run, which "
            "had nothing left to do; set steps higher to go on"
        )
    if found.steps == 0:
        return (
            "the script ended without a step; --elastic is for a loop over meshmend.train.Job or "
            "meshmend.torch.steps"
        )
    equal = {
        True: "replicas equal bit for bit",
        False: "replicas DIFFER",
        None: "replicas not compared",
    }[found.replicas_equal]
    redone = f"; {found.redone} steps done again" if found.redone else ""
    samples = f"samples: {found.used} used, {found.lost} lost, {found.repeated} repeated"
    if not (found.used or found.lost):  # a loop over meshmend.torch.steps hands out none
        samples = "samples not counted"
    return f"{found.steps} steps; {samples}; {equal}{redone}"
