"""Runs years on all cores at the same time.

Years do not depend on each other, and the loops run without the interpreter's lock. Which thread
runs a year changes nothing in its result.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from meshmend.planning.progress import ProgressCallback


def run_years(
    n_years: int, run: Callable[[Iterator[int]], None], progress: ProgressCallback
) -> None:
    """Call `run` once in each of some threads, together with all years.

    If one of them raises, or the user interrupts, the others stop after their current year.
    """
    n_threads = max(1, min(len(os.sched_getaffinity(0)), n_years))
    is_over = threading.Event()

    def years(first: int) -> Iterator[int]:
        for year in range(first, n_years, n_threads):
            if is_over.is_set():
                return
            if first == 0 and year // n_threads % 8 == 0:
                progress("simulating years", year / n_years)
            yield year

    with ThreadPoolExecutor(n_threads) as pool:
        try:
            others = [pool.submit(run, years(first)) for first in range(1, n_threads)]
            run(years(0))
            for other in others:
                other.result()
        finally:
            is_over.set()
