"""One worker process per live chip on this machine: what `meshmend run` does."""
