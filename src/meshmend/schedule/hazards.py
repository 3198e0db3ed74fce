"""What must wait for what: dependencies between the rows of a schedule, derived from it.

A row reads chunks at its source and writes them at its destination, so every dependency is
local to one rank and one chunk:

- `send_after`: rows that wrote what this row sends (read after write). They gate its sending.
- `write_after`: rows that read or wrote what this row will change at its destination (write
  after read, write after write). They gate only the change there, not the sending.

REDUCE rows that add to one cell with no read between them commute: they do not wait for each
other, and whoever reads the cell next waits for all of them. An executor that wants bitwise
repeatable sums adds them in row order; a simulator may take them as they come.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Hazards:
    """Dependencies as two lists of lists: row r waits for `send_after[send_ptr[r]:send_ptr[r+1]]`
    before it is sent, and for `write_after[write_ptr[r]:write_ptr[r+1]]` before its data are
    put in place. Each list is sorted, without repeats, and names smaller rows only.
    """

    send_ptr: NDArray[np.uint32]
    send_after: NDArray[np.uint32]
    write_ptr: NDArray[np.uint32]
    write_after: NDArray[np.uint32]
