"""How long: links, contention and latency, next to the physical limit."""
