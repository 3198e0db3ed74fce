"""Runs schedules on real arrays: in one process, or between ranks over sockets."""
