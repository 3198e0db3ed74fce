"""Calls a pickled function: what the workers of a Ray job run that was given one, not a script.

    meshmend worker ... -m meshmend.launch.pickled_loop FILE

The file comes from the agent of the same host, not over a wire of ours.
"""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    pickle.loads(Path(sys.argv[1]).read_bytes())()
