"""Runs a notebook and prints what its cells print; `test_jax_examples` runs this as a script."""

import sys

import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)  # type: ignore[no-untyped-call]  # it has no types
NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        if output.output_type == "stream" and output.name == "stdout":
            print(output.text, end="")
