"""Before a step: chips look at their links if that is due, and take better plans if there are some.

It is the same for the chips of a `Job` and for those of an elastic process group. `LinkSpeeds` says
what the figures mean, `Exchange` gets them to all chips and has plans made.
"""

from functools import partial

from meshmend.membership.events import FabricMeasured, LinkRestored, LinkSlow
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.worker_environment import coordinator_client
from meshmend.train.core.worker_loop import WorkerLoop


def take_better_plans(loop: WorkerLoop, exchange: Exchange, known: str, step: int) -> bool:
    """Look at the links if that is due, and swap plans if better ones are sought.

    All chips call this before the same steps. `known` are the speeds of links that were found, as
    of the last step. Return False if the mesh changed.
    """
    for is_wanted, act in (
        (exchange.is_look_due(), partial(_look_at_links, exchange, known, step)),
        (exchange.is_provisional, exchange.swap_plans),
    ):
        if is_wanted and not loop.attempt(act, is_step=False):
            return False
    return True


def _look_at_links(exchange: Exchange, known: str, step: int) -> None:
    before = exchange.measured_fabric
    changed, chip = exchange.look_at_links(known), exchange.members[exchange.rank]
    reports: list[FabricMeasured | LinkSlow | LinkRestored] = []
    measured = exchange.measured_fabric
    if measured is not None and measured is not before:
        reports.append(
            FabricMeasured(
                measured.link_bandwidth_bytes_per_s,
                measured.hop_latency_s,
                measured.message_overhead_s,
                step,
                chip,
            )
        )
    for each in changed:
        event = LinkRestored if each.speed == 1 else LinkSlow
        reports.append(event(str(each.link), each.speed, step, chip))
    if exchange.rank == 0:
        for report in reports:
            coordinator_client().report(report)
