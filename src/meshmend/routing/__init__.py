"""Routes of messages: next-hop tables around any hole, and the proof that none waits for ever."""
