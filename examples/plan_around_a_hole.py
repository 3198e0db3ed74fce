"""Sum gradients on an 8x8 mesh that lost a 2x2 board: a mesh, a failure, a plan, a run."""

import numpy as np

from meshmend import Mesh, plan

mesh = Mesh((8, 8)).without("2x2@2,2")
gradients = [np.full(1000, rank, dtype=np.float32) for rank in range(mesh.n_live)]
around_the_hole = plan(mesh, "ft-two-d")
sums = around_the_hole.run(gradients)
print(mesh, "->", len(sums), "sums, each", sums[0][0])

facts = around_the_hole.summary()
for key in ("algorithm", "ranks", "rows", "verified", "deadlock_free", "virtual_channels"):
    print(f"{key:<16} {facts[key]}")
assert all(np.array_equal(each, np.sum(gradients, axis=0)) for each in sums)
