"""Choose: build, verify and describe a plan.

The layer is called `planning`, not `plan`: `from meshmend import plan` is the function.
"""
