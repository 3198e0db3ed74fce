"""Connections between processes: a shared secret, a handshake, a listener, and framed messages."""
