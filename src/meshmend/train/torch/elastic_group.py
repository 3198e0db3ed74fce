"""A process group that outlives its chips, for scripts that keep their own DDP loop.

    dist.init_process_group("meshmend")
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meshmend.torch.reconfigure(model, optimizer)
    for step in meshmend.torch.steps(1000):
        with meshmend.torch.retrying():
            ...  # forward, backward, optimizer.step()

Each chip begins with a group of its own. `reconfigure` joins the job: the default process group is
then that of all live chips, and a chip that comes late has the state of the others. When a chip
dies or comes back, every collective under way fails, and `retrying` calls `reconfigure` again.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.torch.group_member import Build, ElasticGroup
from meshmend.train.torch.learner import Stateful

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def reconfigure(*state: Stateful, build: Build | None = None) -> None:
    """Make the default process group one of all live chips, and the state the same on all.

    The first call joins the job. `state` is what changes from step to step: the model, the
    optimizer, a scheduler. A `DistributedDataParallel` among it uses the new group from then on.
    What PyTorch cannot move to another group, such as a model of `fully_shard`, is made anew:
    `build()` makes the group's objects and returns those with a state.

    A later call needs no arguments. It returns at once if the group is as it should be, and waits
    for the coordinator's next generation if it is not.

    Raises:
        InputError: an object has no state, or no chip holds all of it.
        JobFailedError: no chip has a state to go on from.
        RefusedError: the coordinator refuses this worker.
    """
    elastic_group().reconfigure(state, build)


def steps(n_steps: int) -> Iterator[int]:
    """Yield the number of the step to do, from the steps done so far up to `n_steps`.

    A step whose `retrying` block failed is yielded again. The end waits until all chips are done.

    Raises:
        InputError: `reconfigure` was not called before.
    """
    return elastic_group().steps(n_steps)


@contextmanager
def retrying() -> Iterator[tuple[Stateful, ...]]:
    """Do one step; if the mesh changes meanwhile, reconfigure, and the step is to be done again.

    Yields the objects of `reconfigure`. The step counts once the optimizer has stepped.
    """
    group = elastic_group()
    group.begin_step()
    try:
        yield group.objects
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        group.handle_failure(error)
    else:
        group.complete_step()


def elastic_step(
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result | None]:
    """Return the function as one step that is called again until the step counts.

    It returns None if another chip did the step and this one took over its state.
    """

    @functools.wraps(function)
    def step(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result | None:
        group = elastic_group()
        done, result = group.step_number, None
        while group.is_to_do(done):
            with retrying():
                result = function(*arguments, **named)
        return result

    return step


@functools.cache
def elastic_group() -> "ElasticGroup":
    """Return the elastic group of this process."""
    return ElasticGroup(worker_environment())
