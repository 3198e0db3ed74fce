"""What a chip of an elastic group holds when a state does not come as it was announced."""

from pathlib import Path

import pytest
import torch

from meshmend.errors import CheckpointDamageError
from meshmend.train import Saving
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.data.samples import Order
from meshmend.train.torch.elastic_group import ElasticGroup
from meshmend.train.torch.job_record import JobRecord, SampleTerms


def test_a_checkpoint_that_cannot_be_read_leaves_a_chip_the_state_that_it_has(
    tmp_path: Path,
) -> None:
    """Another chip says: read step 4. There is none here, and this chip may be needed still."""
    environment = WorkerEnvironment()
    weight = torch.nn.Linear(2, 1)
    terms = SampleTerms(Order(8, 0), batch=2, steps=9, samples=lambda: "")
    group = ElasticGroup(environment)
    group.use_built(
        lambda: [weight, torch.optim.SGD(weight.parameters())],
        record=JobRecord(environment, terms, Saving(tmp_path, every=1)),
    )
    group.enter()

    with pytest.raises(CheckpointDamageError):
        group.take_state({"step": 4, "objects": [], "moving": [], "checkpoint": True})

    assert group.step_number == 0
    assert len(group.state()["objects"]) == 2
