"""`meshmend testbed`: a real mesh network on this machine, whose chips and links can fail."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.console import announce_compilation, print_json
from meshmend.cli.options import (
    FailOption,
    JsonOption,
    MeshOption,
    SlowOption,
    WrapOption,
    command_group,
    mesh_of,
)
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.lab.testbed.bed import Testbed
    from meshmend.topology.failures import Chip

app = command_group(
    "A real mesh network out of Linux network namespaces: make it, break it, mend it.",
    start_with="testbed up --mesh 4x4 --link 50Mbit",
)

NameArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Which testbed; needed if there are several.")
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Which testbed; needed if there are several."),
]
WhatArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="WHAT...",
        help="4x2@6,8 (block), 3,4 (chip), link:3,4-3,5, board:3,4 or host:3,4.",
    ),
]


@app.command("up")
def up_command(
    mesh: MeshOption,
    link: Annotated[
        str,
        typer.Option("--link", metavar="RATE", help="Rate of a link, each direction: 50Mbit."),
    ],
    wrap: WrapOption = "none",
    fail: FailOption = None,
    slow: SlowOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Its name; else bed1, bed2, ...")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a mesh network: a namespace per chip, a rate-limited link between neighbours.

    Routes are those of 'meshmend show --route', around every hole. It stays until 'meshmend
    testbed down', or until the machine restarts. Needs root or user namespaces, and iproute2.

    **Examples**

    - meshmend testbed up --mesh 4x4 --fail 2x2@0,2 --link 50Mbit

    - meshmend testbed up --mesh 4x4 --slow link:0,0-0,1=0.25 --link 50Mbit

    - meshmend testbed exec 0,0 ping -c 3 10.0.0.16
    """
    from meshmend.units import parse_bandwidth

    begin, bandwidth = mesh_of(mesh, wrap, fail, slow), parse_bandwidth(link)
    announce_compilation()
    from meshmend.lab.testbed.bed import Testbed

    bed = Testbed.up(begin, link_bandwidth=bandwidth, name=name, persistent=True)
    _print_bed(bed, as_json=as_json)


@app.command("down")
def down_command(
    name: NameArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Take down all testbeds.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take a testbed down, end what runs in it, and leave nothing behind.

    **Examples**

    - meshmend testbed down

    - meshmend testbed down --all
    """
    from meshmend.lab.testbed import records
    from meshmend.lab.testbed.bed import Testbed

    if everything and name is not None:
        raise InputError(f"down needs a name or --all, but got both: {name!r} and --all")
    with records.locked():
        leftovers = records.sweep()
    if everything:
        beds = [Testbed.of(record) for record in records.live_records()]
    else:
        beds = [] if name in leftovers else [Testbed.attach(name)]
    for bed in beds:
        bed.down()
    if as_json:
        print_json({"down": [bed.name for bed in beds], "leftovers": list(leftovers)})
        return
    for bed in beds:
        print(f"down         {bed.name}")
    for leftover in leftovers:
        print(f"down         {leftover} (its holder was gone already)")
    if not beds and not leftovers:
        print("no testbed is up")


@app.command("status")
def status_command(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """Show the testbeds: which chips and links are up, at which rate, what they lose, and where.

    **Examples**

    - meshmend testbed status

    - meshmend testbed status --json
    """
    from meshmend.lab.testbed import records
    from meshmend.lab.testbed.bed import Testbed

    found = records.live_records() if name is None else (records.load(name),)
    beds = [Testbed.of(record) for record in found]
    if as_json:
        print_json({"testbeds": [_facts(bed) for bed in beds]})
        return
    for bed in beds:
        _print_bed(bed, as_json=False)
    if not beds:
        print("no testbed is up")


@app.command(
    "exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def exec_command(
    chip: Annotated[str, typer.Argument(metavar="CHIP", help="The chip: 3,4.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The command to run.")],
    name: NameOption = None,
) -> None:
    """Run a command on a chip, and exit with its exit code.

    **Examples**

    - meshmend testbed exec 0,0 ip route

    - meshmend testbed exec --name bed2 0,0 ping -c 3 10.0.0.16
    """
    from meshmend.lab.testbed.bed import Testbed

    place = _chip_of(chip)
    code = Testbed.attach(name).run(place, command).returncode
    raise typer.Exit(code if code >= 0 else 128 - code)


@app.command("fail")
def fail_command(what: WhatArgument, name: NameOption = None, as_json: JsonOption = False) -> None:
    """Take chips, boards or links out of the live network and route around them.

    Links go down; processes on a failed chip keep running, cut off. To see how a job survives this,
    kill its workers on these chips too.

    **Examples**

    - meshmend testbed fail 2x2@0,2

    - meshmend testbed fail link:1,0-1,1
    """
    from meshmend.lab.testbed.bed import Testbed

    bed = Testbed.attach(name)
    bed.fail(*what)
    _print_bed(bed, as_json=as_json)


@app.command("repair")
def repair_command(
    what: WhatArgument, name: NameOption = None, as_json: JsonOption = False
) -> None:
    """Bring chips, boards or links back into the live network.

    **Examples**

    - meshmend testbed repair 2x2@0,2
    """
    from meshmend.lab.testbed.bed import Testbed

    bed = Testbed.attach(name)
    bed.repair(*what)
    _print_bed(bed, as_json=as_json)


@app.command("slow")
def slow_command(
    links: Annotated[
        list[str],
        typer.Argument(metavar="LINK=SPEED...", help="link:3,4-3,5=0.25; 1 for the rate of all."),
    ],
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make links of the live network slower, or as fast as the others again.

    **Examples**

    - meshmend testbed slow link:0,0-0,1=0.25

    - meshmend testbed slow link:0,0-0,1=1
    """
    from meshmend.lab.testbed.bed import Testbed

    bed = Testbed.attach(name)
    bed.slow(*links)
    _print_bed(bed, as_json=as_json)


@app.command("lose")
def lose_command(
    links: Annotated[
        list[str],
        typer.Argument(metavar="LINK=PART...", help="link:3,4-3,5=0.01 loses a hundredth."),
    ],
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lose packets of the live network at random, each way, or none again.

    **Examples**

    - meshmend testbed lose link:0,0-0,1=0.01

    - meshmend testbed lose link:0,0-0,1=0
    """
    from meshmend.lab.testbed.bed import Testbed

    parts = [_part_of(text) for text in links]
    bed = Testbed.attach(name)
    for link, part in parts:
        bed.lose(link, part)
    _print_bed(bed, as_json=as_json)


def _part_of(text: str) -> tuple[str, float]:
    link, _, part = text.rpartition("=")
    try:
        return link, float(part)
    except ValueError:
        raise InputError(
            f"testbed lose needs a link and a part such as link:0,0-0,1=0.01, but got {text!r}"
        ) from None


@app.command("check")
def check_command(
    name: NameArgument = None,
    between: Annotated[
        str | None,
        typer.Option("--between", metavar="A-B", help="Which link: 0,0-0,1; else the first."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure one link with half a second of TCP and compare it with the rate asked for.

    **Examples**

    - meshmend testbed check

    - meshmend testbed check --between 0,0-0,1 --json
    """
    from meshmend.lab.testbed.bed import Testbed
    from meshmend.lab.testbed.measure import link_rate
    from meshmend.topology.failures import Link, parse_failure
    from meshmend.units import format_bandwidth

    bed = Testbed.attach(name)
    chosen = None if between is None else parse_failure(f"link:{between}")
    assert chosen is None or isinstance(chosen, Link)
    rate = link_rate(bed, chosen)
    if as_json:
        print_json(
            {
                "name": bed.name,
                "link": str(rate.link),
                "asked_bytes_per_s": rate.asked_bytes_per_s,
                "measured_bytes_per_s": rate.measured_bytes_per_s,
                "ratio": rate.ratio,
            }
        )
        return
    print(f"link         {rate.link} of {bed.name}, one way")
    print(f"asked        {format_bandwidth(rate.asked_bytes_per_s)}")
    print(f"measured     {format_bandwidth(rate.measured_bytes_per_s)}, TCP payload")
    print(f"ratio        {rate.ratio:.3f} (headers take 0.007)")


def _chip_of(text: str) -> "Chip":
    from meshmend.topology.failures import Block, parse_failure

    place = parse_failure(text) if text[:1].isdigit() else None
    if not isinstance(place, Block) or set(place.shape) != {1}:
        raise InputError(f"exec needs a chip such as 3,4, but got {text!r}")
    return place.origin


def _facts(bed: "Testbed") -> dict[str, Any]:
    from meshmend.lab.testbed.names import intact
    from meshmend.lab.testbed.records import way_of

    record = bed.record
    mesh = record.current_mesh()
    full = intact(mesh)
    up = set(mesh.live_links())
    return {
        "name": bed.name,
        "mesh": str(mesh),
        "link_bytes_per_s": bed.link_bandwidth,
        "holder": bed.holder,
        "owner": record.owner,
        "user_namespace": bed.is_user,
        "settled": record.settled,
        "chips": [
            {
                "chip": list(chip),
                "address": bed.address(chip),
                "namespace": bed.namespace(chip),
                "up": chip in mesh.rank_of,
            }
            for chip in full.live
        ],
        "links": [
            {
                "link": str(link),
                "up": link in up,
                "speed": mesh.speed_of(link),
                "loses": [
                    record.loses.get(way_of(*ends), 0.0)
                    for ends in ((link.first, link.second), (link.second, link.first))
                ],
            }
            for link in full.live_links()
        ],
    }


def _print_bed(bed: "Testbed", *, as_json: bool) -> None:
    from meshmend.pages.draw.mesh_picture import mesh_text
    from meshmend.topology.failures import format_chip
    from meshmend.units import format_bandwidth

    facts = _facts(bed)
    if as_json:
        print_json(facts)
        return
    chips, links = facts["chips"], facts["links"]
    chips_up, links_up = (sum(part["up"] for part in parts) for parts in (chips, links))
    megabits = f"{8e-6 * bed.link_bandwidth:g} Mbit/s"
    until = f"process {facts['owner']} ends" if facts["owner"] else "taken down"
    owner = "root" if not bed.is_user else "a user namespace"
    first, last = (
        f"{chip['address']} ({format_chip(chip['chip'])})" for chip in (chips[0], chips[-1])
    )
    n_slow = sum(link["speed"] < 1 for link in links)
    slow = f", {n_slow} of them slower" if n_slow else ""
    lines = {
        "testbed": f"{bed.name}, made by {owner}, up until {until} (holder: {bed.holder})",
        "mesh": facts["mesh"],
        "chips": f"{chips_up} up, {len(chips) - chips_up} down",
        "addresses": f"{first} to {last}, in row-major order",
        "links": f"{links_up} up, {len(links) - links_up} down; "
        f"{format_bandwidth(bed.link_bandwidth)} ({megabits}) each way{slow}",
    }
    if lossy := [link for link in links if any(link["loses"])]:
        lines["packets"] = "; ".join(
            "{link} loses {0:g} of them there, {1:g} back".format(*each["loses"], **each)
            for each in lossy
        )
    if not facts["settled"]:
        lines["unsettled"] = (
            "a change was interrupted; the next fail or repair sets all links and routes anew"
        )
    print(mesh_text(bed.mesh))
    for name, text in lines.items():
        print(f"{name:<12} {text}")
