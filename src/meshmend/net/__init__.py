"""Connections between processes: the shared secret, the listener, and whole messages."""
