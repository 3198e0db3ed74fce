"""One message from a to b: next-hop tables around any hole, and the proof that none waits forever."""
