"""Hypothesis runs the same examples everywhere, and no test fails for being slow to compile."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")
