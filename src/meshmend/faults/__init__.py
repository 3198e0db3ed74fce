"""What can fail in a run: faults as values, random faults, and faults that are injected."""
