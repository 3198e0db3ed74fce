"""How long a schedule takes: links, contention and latency."""
