"""Plans: choose an algorithm, build its schedule, prove it, and say what it costs.

The layer is called `planning`, not `plan`: `from meshmend import plan` is the function.
"""
