"""Starts one worker process per live chip on this machine: `meshmend run` and `meshmend train`."""
