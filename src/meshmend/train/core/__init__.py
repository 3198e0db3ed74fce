"""The step loop: who steps, what is summed, how a chip recovers."""
