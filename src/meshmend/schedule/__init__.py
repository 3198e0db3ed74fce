"""Schedules: the table of transfers, its hazards, and one builder per algorithm."""
