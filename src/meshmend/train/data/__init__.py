"""Samples: which chip takes which, and the ledger that proves it."""
