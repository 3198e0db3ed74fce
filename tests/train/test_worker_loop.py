"""A worker's loop, by hand; `tests/membership/test_protocol.py` runs it through everything."""

from unittest.mock import Mock

from meshmend.membership.client import News
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.membership.messages import Over
from meshmend.train.core.worker_loop import WorkerLoop


def test_a_worker_that_comes_after_the_end_knows_that_it_was_no_member() -> None:
    """Otherwise it takes itself for the one that prints the result."""
    coordination = Mock()
    coordination.await_news.return_value = News(end=Over())
    replica, peers = Mock(step_number=0, is_finished=False), Mock(generation_number=0)
    replica.newest_checkpoint.return_value = None
    loop = WorkerLoop(
        (0, 0), replica, coordination, peers, SelfInjection((0, 0), ()), catch_up=Mock()
    )

    loop.start()

    assert loop.is_over
    assert loop.was_waiting


def test_a_worker_with_a_part_tells_its_checkpoint_again_when_it_waits_for_something_else() -> None:
    """One that has waited from the beginning for a place in a tile told that there was none."""
    coordination = Mock()
    news = [
        News(),
        News(wait="no place in a tile"),
        News(wait="no place in a tile"),
        News(wait="no chip holds the state"),
        News(end=Over()),
    ]
    found = iter(news)
    coordination.await_news.side_effect = lambda is_it: next(each for each in found if is_it(each))
    replica, peers = Mock(step_number=0, is_finished=False), Mock(generation_number=0)
    replica.newest_checkpoint.side_effect = [None, None, 5]
    self_injection = SelfInjection((0, 0), ())
    loop = WorkerLoop(
        (0, 0), replica, coordination, peers, self_injection, catch_up=Mock(), has_part=True
    )

    loop.start()

    told = [call.args[0].checkpoint for call in coordination.tell.call_args_list]
    assert told == [None, 5]
