"""`meshmend forecast`: what failures cost over years, and which answer to them is best."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.console import (
    announce_compilation,
    cache_dir,
    check_readable,
    check_suffix,
    check_writable,
    note,
    print_json,
    progress,
    write_text,
)
from meshmend.cli.options import JsonOption
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.forecast.forecasting import AnswerForecast, Forecast
    from meshmend.forecast.inputs import ForecastQuestion


_WIDE, _HEAD_WIDE, _LEAST_WIDE = 60, 10, 10  # of the table, the words in front, one answer

Text = str | None
_PANEL = "Inputs"


def _option(name: str, metavar: str, words: str) -> typer.models.OptionInfo:
    return typer.Option(f"--{name}", metavar=metavar, help=words, rich_help_panel=_PANEL)  # type: ignore[no-any-return]


def advice_on(option: str) -> str:
    """Return how to give an input that somebody takes for an option; empty if it is no input."""
    from meshmend.forecast.inputs import INPUTS

    name = option.lstrip("-")
    return f"it is an input: --set {name}=VALUE" if name in INPUTS else ""


def forecast_command(
    mesh: Annotated[Text, _option("mesh", "RxC", "Extents, up to three.")] = None,
    wrap: Annotated[Text, _option("wrap", "AXES", "none, all, or 0,1.")] = None,
    host: Annotated[Text, _option("host", "4x2", "Chips of a host.")] = None,
    failures_per_1000_host_days: Annotated[
        Text, _option("failures-per-1000-host-days", "N", "How often one host fails.")
    ] = None,
    repair: Annotated[Text, _option("repair", "24h", "Mean time of a repair by hand.")] = None,
    spares: Annotated[Text, _option("spares", "N", "Spare hosts, or other spare units.")] = None,
    payload: Annotated[Text, _option("payload", "SIZE", "Bytes to sum per chip.")] = None,
    fabric: Annotated[
        Text, _option("fabric", "FABRIC", "The links: 'meshmend fabrics' lists them.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any other input, such as crews=2; repeat for more. --example lists all. An "
            "option counts more than --set, then come --config, --preset, the default.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Public figures; repeat for more.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Inputs in a TOML file; see --example.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(
            "--answer",
            metavar="NAME",
            help="fire-fighter, sub-mesh, spares, fault-tolerant, or a mixture: "
            "spares+fault-tolerant, spares+sub-mesh, fault-tolerant:2+spares. Repeat for more.",
        ),
    ] = None,
    years: Annotated[int, typer.Option("--years", metavar="N", help="Years to simulate.")] = 100,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="The same seed gives the same bits.")
    ] = 0,
    price: Annotated[
        float | None, typer.Option("--price", metavar="PRICE", help="Price of a chip for an hour.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Replay failures: a CSV of node,down,up, or LANL's file.",
        ),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="With --trace: print the rates that fit it, and stop.")
    ] = False,
    break_even: Annotated[
        bool, typer.Option("--break-even", help="Say where the best answer changes.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write an HTML page with charts."),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print a commented file for --config.")
    ] = False,
    list_presets: Annotated[
        bool, typer.Option("--list-presets", help="Print the presets and their sources.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say how much training a machine gives when its parts fail, for each answer to a failure.

    Simulates years of failures and repairs, the same ones for each answer: wait for the repair
    (fire-fighter), train in the largest intact box (sub-mesh), switch in spares, or go on around
    the hole (fault-tolerant). Goodput is the training done over what the full machine would do if
    nothing failed. Every input that is not given is printed as an assumption.

    **Examples**

    - meshmend forecast --mesh 32x32 --host 4x2 --failures-per-1000-host-days 6.5 --repair 24h

    - meshmend forecast --preset tpu-v3-bert --preset meta-rsc-1 --repair 2d -o forecast.html

    - meshmend forecast --mesh 64x64 --preset llama-3 --repair 1d --answer spares --spares 8 --json

    - meshmend forecast --preset lanl --mesh 32x32 --set crews=2 --set spare-unit=row
    """
    options = {
        "mesh": mesh,
        "wrap": wrap,
        "host": host,
        "failures-per-1000-host-days": failures_per_1000_host_days,
        "repair": repair,
        "spares": spares,
        "payload": payload,
        "fabric": fabric,
    }
    if example or list_presets:
        _print_help(example=example)
        return
    from meshmend.forecast.inputs import assigned, gathered

    if trace is not None:
        check_readable(trace, "the trace")
    if fit:
        _print_fit(trace, as_json=as_json)
        return
    check_suffix(output, ".html")
    check_writable(output)
    if price is not None and not 0 <= price < 1e9:
        raise InputError(f"--price needs a number from 0 to 1e9, but got {price}")
    given = assigned(assignments or ())
    given |= {name: value for name, value in options.items() if value is not None}
    from_file: dict[str, str] = {}
    presets = tuple(preset or ())
    if config is not None:
        from meshmend.forecast.inputs import read_config

        from_file, of_file = read_config(config)
        presets = (*of_file, *presets)
    inputs = gathered(given, from_file, presets)
    announce_compilation(ahead="meshmend.forecast.compile_engine")
    from meshmend.forecast.inputs import question_of

    question = question_of(inputs)
    result = _forecast(question, answer, trace, (years, seed), quiet=as_json)
    if output is not None:
        _write_page(question, result, output, price=price, seed=seed, quiet=as_json)
    changes = _changes(result, seed, quiet=as_json) if break_even else None
    if as_json:
        print_json(_document(question, result, price, changes))
    else:
        _print_forecast(question, result, price, changes)
        if output is not None:
            print(f"written      {output}")


def _print_help(*, example: bool) -> None:
    if example:
        from meshmend.forecast.inputs import example_config

        print(example_config(), end="")
        return
    from meshmend.forecast.inputs import PRESETS, written

    for preset in PRESETS.values():
        print(f"{preset.name}: {preset.source}.")
        for name, value in preset.values.items():
            print(f"    {written(name, value)}")


def _print_fit(trace: Path | None, *, as_json: bool) -> None:
    if trace is None:
        raise InputError("--fit needs a trace: give --trace FILE")
    from meshmend.forecast.failure_trace import fitted, read_trace

    found = fitted(read_trace(trace))
    if as_json:
        print_json(found.summary())
    else:
        print(found.describe())


def _forecast(
    question: "ForecastQuestion",
    names: list[str] | None,
    trace: Path | None,
    run: tuple[int, int],
    *,
    quiet: bool,
) -> "Forecast":
    from meshmend.forecast.failure_trace import hosts_for, read_trace, replayed
    from meshmend.forecast.forecasting import FOUR, answers_named, check_run, forecast
    from meshmend.forecast.hole_prices import step_prices
    from meshmend.forecast.machine import check_failures, machine_of
    from meshmend.planning.progress import ProgressShares

    n_years, seed = run
    answers = answers_named(names) if names else FOUR
    check_run(n_years, seed)
    scenario = question.scenario
    outages = read_trace(trace) if trace is not None else None
    with progress(quiet=quiet, or_line=True) as bar:
        bar("loading the simulator")
        shares = ProgressShares(bar, 2).in_turn()
        machine = machine_of(scenario)
        if outages is None:  # before holes are priced, which takes long
            check_failures(machine)
        else:
            hosts_for(outages, machine)
        prices = step_prices(machine, cache_dir=cache_dir(), progress=next(shares))
        if outages is not None:
            return replayed(outages, machine, prices, answers)
        return forecast(
            scenario, prices, answers, n_years=n_years, seed=seed, progress=next(shares)
        )


def _changes(result: "Forecast", seed: int, *, quiet: bool) -> list[str]:
    from meshmend.forecast.sweeps import Sweeper, change_lines, check_lines, slow_lines
    from meshmend.planning.progress import ProgressShares

    with progress(quiet=quiet, or_line=True) as bar:
        sweeper, shares = Sweeper(result, seed), ProgressShares(bar, 5).in_turn()
        repairs = sweeper.repair_curve(next(shares))
        failures = sweeper.failure_curve(next(shares))
        changes = change_lines(repairs, failures, sweeper.spares_curve(next(shares)))
        checks = sweeper.checks_curve(next(shares))
        slow = sweeper.slow_curve(next(shares))
        told = [*(check_lines(checks) if checks else ()), *(slow_lines(slow) if slow else ())]
        return [*changes, *told]


def _write_page(
    question: "ForecastQuestion",
    result: "Forecast",
    path: Path,
    *,
    price: float | None,
    seed: int,
    quiet: bool,
) -> None:
    from meshmend.forecast.forecast_page import forecast_page

    with progress(quiet=quiet, or_line=True) as bar:
        text = forecast_page(question, result, price=price, seed=seed, progress=bar)
    write_text(path, text)
    if not quiet:
        note(f"meshmend: {path} needs no network; open it in a browser")


def _document(
    question: "ForecastQuestion",
    result: "Forecast",
    price: float | None,
    changes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return a forecast as one JSON value."""
    from meshmend.forecast.forecasting import chips_bought, cost_per_step, pricing_words

    answers = []
    for each in result.answers:
        bought = chips_bought(result.scenario, each)
        summary = each.summary() | {
            "chips_bought": bought,
            "goodput_per_chip_bought": each.goodput * result.scenario.mesh.n_chips / bought,
        }
        if price is not None:
            summary["cost_per_step"] = cost_per_step(result, each, price)
        answers.append(summary)
    more = {} if changes is None else {"break_even": list(changes)}
    return more | {
        "answers": answers,
        "best": result.best.answer.name,
        "assumptions": [*question.assumptions, *pricing_words(result)],
        f"{result.period}s": result.n_periods,
        "step_s": result.prices.compute_s + result.prices.full_s,
        "allreduce_s": result.prices.full_s,
        "checkpoint_every_s": result.checkpoint_every_s,
    }


def _print_forecast(
    question: "ForecastQuestion",
    result: "Forecast",
    price: float | None,
    changes: Sequence[str] | None = None,
) -> None:
    """Print the table of answers, the best one, and the assumptions.

    The table is no wider than 60 columns.
    """
    from meshmend.forecast.forecasting import pricing_words
    from meshmend.units import counted, format_duration, format_time

    scenario, prices = question.scenario, result.prices
    of_model = " in the model" if result.is_traced else ""
    print(f"mesh         {scenario.mesh}, {result.n_failures_per_day:.3g} failures a day{of_model}")
    print(
        f"step         {format_time(prices.compute_s)} compute, {format_time(prices.full_s)} "
        f"allreduce of {scenario.job.algorithm} on {scenario.job.fabric.name}"
    )
    print(f"checkpoints  every {format_duration(result.checkpoint_every_s)}")
    done = "replayed " if result.is_traced else "simulated"
    periods = counted(result.n_periods, result.period)
    print(f"{done}    {periods}, the same failures for each answer")
    for block in _blocks(result.answers):
        _print_block(result, block, price)
    print(f"\nbest         {result.best.answer.name}")
    if changes is not None:
        print("break-even" + "".join(f"\n  - {line}" for line in changes or ["none in range"]))
    print("assumed")
    for words in [*question.assumptions, *pricing_words(result)]:
        print(f"  - {words}")


def _width(answer: "AnswerForecast") -> int:
    return max(_LEAST_WIDE, 2 + len(answer.answer.name))


def _blocks(answers: "Sequence[AnswerForecast]") -> "list[list[AnswerForecast]]":
    """Return the answers in order, as many side by side as fit."""
    blocks: list[list[AnswerForecast]] = []
    for each in answers:
        if not blocks or _HEAD_WIDE + sum(map(_width, [*blocks[-1], each])) > _WIDE:
            blocks.append([])
        blocks[-1].append(each)
    return blocks


def _print_block(
    result: "Forecast", answers: "Sequence[AnswerForecast]", price: float | None
) -> None:
    """Print answers side by side; a star marks the best."""
    from meshmend.forecast.forecasting import CAUSES, chips_bought, cost_per_step

    def line(head: str, cells: Sequence[str]) -> None:
        pairs = zip(answers, cells, strict=True)
        print(f"{head:<{_HEAD_WIDE}}" + "".join(f"{cell:>{_width(each)}}" for each, cell in pairs))

    print()
    line("", [each.answer.name for each in answers])
    best = result.best
    line("goodput", [f"{'*' if each is best else ''}{each.goodput:.2%}" for each in answers])
    line("  ±", [f"{each.standard_error:.2%}" for each in answers])
    line(f"P10 {result.period}", [f"{each.percentile(10):.1%}" for each in answers])
    line(f"P90 {result.period}", [f"{each.percentile(90):.1%}" for each in answers])
    line("chips", [str(chips_bought(result.scenario, each)) for each in answers])
    if price:
        line("cost/step", [f"{cost_per_step(result, each, price):.4g}" for each in answers])
    print("lost to")
    for cause in CAUSES:
        if cause.name == "checks" and not result.scenario.wrong.check_every:
            continue
        if cause.name == "slow_parts" and not result.scenario.has_slow_parts:
            continue
        line(cause.head, [f"{each.lost[cause.name]:.2%}" for each in answers])
