"""A worker's loop, by hand; `tests/membership/test_protocol.py` runs it through everything."""

from unittest.mock import Mock

from meshmend.membership.client import News
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.train.core.worker_loop import WorkerLoop


def test_a_worker_that_comes_after_the_end_knows_that_it_was_no_member() -> None:
    """Otherwise it takes itself for the one that prints the result."""
    coordination = Mock()
    coordination.await_news.return_value = News(is_over=True)
    replica, peers = Mock(step_number=0, is_finished=False), Mock(generation_number=0)
    replica.newest_checkpoint.return_value = None
    loop = WorkerLoop(
        (0, 0), replica, coordination, peers, SelfInjection((0, 0), ()), catch_up=Mock()
    )

    loop.start()

    assert loop.is_over
    assert loop.was_waiting
