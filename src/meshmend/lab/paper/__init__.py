"""The paper: its figures, and its tables beside our predictions."""
