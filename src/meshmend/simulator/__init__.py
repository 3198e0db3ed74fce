"""Simulates how long a schedule takes: links, contention and latency."""
