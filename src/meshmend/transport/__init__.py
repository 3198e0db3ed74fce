"""Real bytes between ranks: connections, the handshake, frames, and the executor of plans."""
