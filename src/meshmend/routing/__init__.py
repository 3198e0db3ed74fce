"""One message from a to b: next-hop tables around any hole, and a proof that none waits forever."""
