"""A whole job in one thread, from one seed: real protocol, simulated time, network and disk.

The coordinator, the workers' side of the protocol, the worker's loop, the codec of messages and the
coordinator's record are the real ones. Sockets, threads, files and the clock are simulated, so that
a run is a function of its seed. `runs.simulate` plays one, and `invariants` says what must hold.
"""
