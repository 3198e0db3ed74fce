"""One job per process: a second one is refused, because both would share one seat in the mesh."""

import os

from meshmend.errors import InputError

_is_claimed = False


def claim_process() -> None:
    """Note that this process trains a job on a mesh.

    Raises:
        InputError: it does so already, or has done so.
    """
    global _is_claimed  # one per process is the point
    if _is_claimed:
        raise InputError(
            "a process can train one job, but this script makes a second one; give one Job all "
            "models and optimizers, or run the second script after the first"
        )
    _is_claimed = True


def _release() -> None:
    global _is_claimed  # a forked process may train a job of its own
    _is_claimed = False


os.register_at_fork(after_in_child=_release)
