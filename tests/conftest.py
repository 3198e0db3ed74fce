"""Hypothesis runs the same examples everywhere, and no test fails for being slow to compile.

Torch computes in one thread: a process that is forked from one with more of them hangs.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")
