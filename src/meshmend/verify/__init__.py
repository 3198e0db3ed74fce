"""Proofs of schedules: every contribution is counted, and every hop is followed."""
