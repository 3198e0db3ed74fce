"""Training in JAX: the same core as in PyTorch, so the same promises."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from commanding import meshmend_run
from elastic_job import check_same_losses, elastic, losses, of_kind
from forked_script import JAX, run_forked, run_program
from meshmend.train.state.checkpoint import complete_steps
from packages import needs

pytestmark = needs("jax", "optax")


def jax_job(folder: Path, **options: Any) -> dict[str, Any]:
    """Run a JAX job in processes of its own; JAX in this one would forbid later tests to fork."""
    folder.mkdir()
    result = elastic(folder, framework="jax", **options)
    assert result["finished"], result["why"]
    audit = result["audit"]
    assert (audit["lost"], audit["repeated"], audit["split"], audit["faults"]) == (0, 0, [], [])
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Twenty steps of one chip, without a fault."""
    return jax_job(tmp_path_factory.mktemp("alone") / "run", mesh="1x1", steps=20)


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Twenty steps on four chips, of which one is killed and comes back."""
    return jax_job(
        tmp_path_factory.mktemp("repaired") / "run",
        mesh="2x2",
        steps=20,
        save_every=8,
        inject=["kill 0,1 at 5 in reduce", "repair 0,1 at 8"],
        gate=[10, [["generation", 3], ["arrived", None]]],
    )


def test_a_killed_chip_comes_back_and_the_losses_are_those_of_one_chip(
    alone: dict[str, Any], repaired: dict[str, Any]
) -> None:
    """Also with random numbers in the loss: their keys belong to the samples, not to the chips."""
    assert repaired["chips"] == [4, 3, 4]
    assert repaired["audit"]["hashed"] == 20
    assert len(losses(alone)) == 20
    check_same_losses(repaired, alone, abs_tol=1e-6)


def test_no_program_is_compiled_after_the_start_not_even_for_another_number_of_chips(
    repaired: dict[str, Any],
) -> None:
    said = [line for line in repaired["stderr"].splitlines() if "compiled" in line]

    assert sorted(line[:5] for line in said) == ["[0,0]", "[0,1]", "[1,0]", "[1,1]"]
    assert {line[6:] for line in said} == {"compiled 4 programs, then 0"}


def test_a_job_resumed_on_other_chips_goes_on_with_the_same_losses(
    repaired: dict[str, Any], alone: dict[str, Any], tmp_path: Path
) -> None:
    (saved, *_) = {Path(event["path"]) for event in of_kind(repaired, "checkpoint")}
    assert complete_steps(saved) == [8, 16, 20]
    shutil.rmtree(saved / "step-00000020")

    resumed = jax_job(tmp_path / "run", mesh="1x1", steps=20, resume=str(saved))

    assert min(losses(resumed)) > 16
    check_same_losses(resumed, alone, after=16, abs_tol=1e-6)


@pytest.mark.slow
def test_half_precision_and_chips_without_samples_change_nothing(tmp_path: Path) -> None:
    jobs = [
        jax_job(tmp_path / mesh, mesh=mesh, steps=6, batch=3, dtype="bfloat16")
        for mesh in ("1x1", "1x5")
    ]

    check_same_losses(*jobs, abs_tol=1e-3)


WRONG = """
import json
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
import jax, jax.numpy as jnp, numpy as np, optax
from meshmend.errors import InputError
from meshmend.train import JaxJob

def losses(params, batch):
    return jnp.square(batch[0] @ params["weight"] - batch[1])

good = {"weight": np.ones(3, np.float32)}
data = (np.arange(30, dtype=np.float32).reshape(10, 3) / 9, np.ones(10, np.float32))
options = {"batch": 4, "steps": 3}

def of(params=good, loss=losses, data=data, optimizer=optax.sgd(0.1), **changes):
    return JaxJob(params, optimizer, loss, data, **{**options, **changes})

def step_on(batch):
    job = of()
    next(iter(job))
    job.step(batch)

def step_twice():
    job = of()
    for batch in job:
        job.step(batch)
        job.step(batch)

def no_step():
    for batch in of():
        pass

def donate():
    job = of()
    used_up = jax.jit(lambda leaf: leaf * 0.9, donate_argnums=0)
    for batch in job:
        job.params["weight"] = used_up(job.params["weight"])
        job.step(batch)

def mixed(params, batch):
    return losses(params, (batch[0] - batch[0].mean(0), batch[1]))

def regularised(params, batch):
    return losses(params, batch) + 1e-3 * ((batch[0] @ params["weight"]) ** 2).mean()

def numbered(params, batch):
    return losses(params, batch) * (1 + jnp.arange(len(batch[0])))

def balanced(params, batch):  # all that is tried but the first sample is of one class
    mine = batch[1] > 0
    return losses(params, batch) * jnp.where(mine, 1, len(mine) / jnp.maximum((~mine).sum(), 1))

def spread(params, batch):  # of copies of one sample, it is no number
    return losses(params, ((batch[0] - batch[0].mean(0)) / batch[0].std(0), batch[1]))

sorted_data = (data[0], np.array([-1.0] + 9 * [1.0], np.float32))

def one_key(params, batch, keys):
    return losses(params, (batch[0] * jax.random.bernoulli(keys[0], 0.5, (3,)), batch[1]))

def per_sample(gradients, state, params=None):  # as optax.contrib.dpsgd does
    raise ValueError("a gradient of each sample is needed")

def of_teacher(change, **outside):
    outside = SimpleNamespace(**outside)
    job = of(
        loss=lambda *two: losses(*two)
        + outside.teacher["weight"].sum()
        + outside.by * unsorted["b"]
    )
    for batch in job:
        job.step(batch)
        change(outside)

def new_teacher(outside):
    outside.teacher = {"weight": outside.teacher["weight"] * 0.9}

def new_weight(outside):
    outside.teacher["weight"] = outside.teacher["weight"] * 0.9

def in_place(outside):
    outside.teacher["weight"] *= 0.9

def new_number(outside):
    outside.by += 1

def new_other(outside):
    outside.n_steps += 1

def equal_array(outside):
    outside.by = jnp.ones(()) * outside.by

rate, weight, mean = 0.1, 1.0, 0.0  # the last two are also a key and an attribute in losses

def rates(count):
    return rate

def used(params, batch):
    return jnp.square(batch[0] @ params["weight"] - batch[1].mean(axis=()))

def of_globals(name, optimizer):
    job = of(loss=used, optimizer=optimizer)
    for batch in job:
        job.step(batch)
        globals()[name] *= 0.5

class Task:
    by = 1.0

    def losses(self, params, batch):
        return losses(params, batch) * self.by

factor = 1.0

def by_factor(params, batch):
    return losses(params, batch) * factor

def losses_of_two_jobs():
    global factor
    found = []
    for factor in (1.0, 2.0):
        job = of(loss=by_factor)
        for batch in job:
            job.step(batch)
            break
        found.append(job.loss)
    return found[1] / found[0]

def of_method(task):
    job = of(loss=task.losses)
    for batch in job:
        job.step(batch)
        task.by = 2.0

teacher = {"teacher": {"weight": np.ones(3, np.float32)}, "by": 1, "n_steps": 0}
unsorted = {0: "a", "b": 1}

@dataclass
class Scaled:
    by: float

    def __call__(self, params, batch):
        return losses(params, batch) * self.by

def of_outside(loss, change):
    job = of(loss=loss)
    for batch in job:
        job.step(batch)
        change()

class Slotted:
    __slots__ = ("by",)

class Model:
    def __init__(self):
        self.cfg, self.n_steps, self.params = {"by": 1.0, "n_steps": 0}, 0, None

    @property
    def scale(self):
        return self.cfg["by"]

    def losses(self, params, batch):
        return losses({"params": params}["params"], batch) * self.scale

def deep_values():
    numbers, nested, slotted, model = [1.0], {"loss": {"by": 1.0}}, Slotted(), Model()
    slotted.by = 1.0

    def scaled(params, batch, by={"by": 1.0}):
        return losses(params, batch) * by["by"]

    def held(params, batch, held={"loss": scaled, "other": unsorted}):  # JAX cannot sort the other
        return held["loss"](params, batch) + len(held["other"])

    def count():  # what the loss does not read
        model.n_steps += 1
        model.cfg["n_steps"] += 1
        model.params = {"weight": jnp.ones(3) * model.n_steps}

    return [
        (lambda *two: losses(*two) * numbers[0], lambda: numbers.append(numbers.pop() / 2)),
        (lambda *two: losses(*two) * nested["loss"]["by"], lambda: nested["loss"].update(by=2.0)),
        (lambda *two: losses(*two) * slotted.by, lambda: setattr(slotted, "by", 2.0)),
        (lambda *two: losses(*two) * Task.by, lambda: setattr(Task, "by", Task.by / 2)),
        (scaled, lambda: scaled.__defaults__[0].update(by=2.0)),
        (partial(scaled, by=nested["loss"]), lambda: nested["loss"].update(by=3.0)),
        (held, lambda: scaled.__defaults__[0].update(by=4.0)),
        (lambda *two: model.losses(*two), lambda: model.cfg.update(by=2.0)),
        (model.losses, count),
    ]

def kept_as(first, change):
    def update(gradients, state, params=None):
        return jax.tree.map(lambda leaf: -0.1 * leaf, gradients), {"kept": change(state["kept"])}

    return optax.GradientTransformation(lambda params: {"kept": first}, update)

def mean_of_first_axis(gradients, params):  # as optax.contrib.dpsgd does
    return jax.tree.map(lambda leaf: leaf.mean(0), gradients)

def at_rate(first, then):
    job = of(optimizer=optax.inject_hyperparams(optax.sgd)(first))
    for batch in job:
        job.opt_state.hyperparams["learning_rate"] = then
        job.step(batch)

def narrower_loop():
    with jax.enable_x64(True):
        job = of(params={"weight": np.ones(3)})
    job.step(next(iter(job)))

def said(call):
    try:
        call()
    except InputError as error:
        return str(error)

print(json.dumps([said(call) for call in (
    lambda: of(loss=lambda params, batch: losses(params, batch).mean()),
    lambda: of(loss=lambda params, batch: (losses(params, batch), {"batch_stats": 1.0})),
    lambda: of(params={"params": good, "batch_stats": {"mean": np.ones(3, np.float32)}}),
    lambda: of(params={"norm": {"batch_stats": np.ones(3, np.float32)}, **good}),
    lambda: of(optimizer=optax.lbfgs()),
    lambda: of(optimizer=optax.adam),
    lambda: of(loss=None),
    lambda: of(params={}),
    lambda: of(params={"weight": np.ones(3, np.int32)}),
    lambda: of(params={"weight": 1.0}),
    lambda: of(data=(np.ones(3), np.ones(4))),
    lambda: of(data={}),
    lambda: of(micro_batch=0),
    lambda: of(batch=0),
    lambda: of(policy="grow"),
    lambda: step_on(tuple(part[:2] for part in data)),
    step_twice,
    no_step,
    lambda: of(loss=lambda *two: losses(*two).astype(int)),
    lambda: of(data=zip(*data)),
    lambda: of(data=[np.ones(n) for n in (1, 2, 3)]),
    lambda: of(data=(data[0], np.array(["text"] * 10))),
    lambda: of(data=data[0][:0]),
    lambda: of(steps=2.5),
    donate,
    *(lambda loss=loss: of(loss=loss, batch=2) for loss in (mixed, regularised, numbered)),
    lambda: of(loss=one_key, random_keys=True),
    lambda: of(loss=Scaled(2.0)),
    lambda: of(loss=balanced, data=sorted_data),
    lambda: of(loss=spread),
    lambda: of(optimizer=optax.GradientTransformation(lambda params: (), per_sample)),
    lambda: of(data=(*data, jax.random.split(jax.random.key(0), 10))),
    lambda: of(data=[(*two, jax.random.key(0)) for two in zip(*data)]),
    lambda: of(data=(*data, np.zeros(10, "datetime64[s]"))),
    *(lambda change=change: of_teacher(change, **teacher)
      for change in (new_teacher, new_weight, in_place, new_number, new_other)),
    lambda: of_teacher(equal_array, **{**teacher, "by": jnp.ones(())}),
    lambda: of_globals("rate", optax.sgd(rates)),
    lambda: of_globals("weight", optax.sgd(0.1)),
    lambda: of_globals("mean", optax.sgd(0.1)),
    lambda: of_method(Task()),
    *(lambda outside=outside: of_outside(*outside) for outside in deep_values()),
    lambda: of(loss=lambda *two: losses(*two) / len(two[1][0]), batch=6),
    lambda: of(optimizer=kept_as(jnp.ones((), int), lambda decay: decay * 0.5)),
    lambda: of(optimizer=kept_as(jnp.ones(()), lambda decay: jnp.ones(2) * decay)),
    lambda: of(optimizer=kept_as(None, lambda _: jnp.ones(()))),
    lambda: of(optimizer=kept_as(1, lambda _: 3)),
    lambda: of(optimizer=optax.stateless(mean_of_first_axis)),
    lambda: of(optimizer=optax.GradientTransformation(lambda _: (), lambda *_: ({}, ()))),
    lambda: at_rate(1, 0.5),
    lambda: at_rate(1.0, 0.5),
    lambda: at_rate(1, 2),
    narrower_loop,
)] + [losses_of_two_jobs()]))
"""


MIXED = (
    "JaxJob needs a loss of each sample that depends on no other, but that of sample 0 is another "
    "beside other samples; a share is computed in parts, of which the last is filled up; remove "
    "what mixes the samples, such as batch normalisation, a term of the whole batch, or one random "
    "key for all"
)
KEYS = (
    "JaxJob needs arrays that NumPy can hold, but got random keys; pass jax.random.key_data(keys), "
    "and make keys of it with jax.random.wrap_key_data; for a loss, the job can draw them "
    "(random_keys=True)"
)
STALE = (
    "JaxJob compiles loss and optimizer once, with the values that they read from outside, but the "
    "loop has changed {} since, of which they do not hear; put it into the samples, or into "
    "params, with optax.set_to_zero() as its optimizer, and change it there"
)
KEPT = (
    "JaxJob needs an optimizer whose state keeps its shapes and kinds of numbers, but init made "
    "state['kept'] {}, and update made it {}"
)


def test_wrong_arguments_are_refused_with_what_they_should_be(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import warnings\nwarnings.simplefilter('error')\n{WRONG}")
    done = run_forked(str(script), imported=JAX)
    assert done.returncode == 0, done.stderr

    said = json.loads(done.stdout)
    assert said == [
        "the loss function of a JaxJob needs to return one loss per sample, an array of shape "
        "(2,), but returned shape (); leave out the mean",
        "the loss function of a JaxJob needs to return one loss per sample and nothing else, but "
        "returned a tuple; compute metrics from job.params after the step, and use group or layer "
        "normalisation, which has no statistics to return",
        "JaxJob needs the parameters alone, but got variables that hold batch_stats beside params, "
        "which the optimizer would train; pass variables['params'], and use group or layer "
        "normalisation, or the statistics as they are (use_running_average)",
        "JaxJob needs parameters that are trained, but params['norm']['batch_stats'] is a running "
        "statistic; keep it out of params, and use group or layer normalisation, or the "
        "statistics as they are (use_running_average)",
        "JaxJob needs an optimizer that steps with the gradients, the parameters and the loss "
        "(value) alone, but: scale_by_zoom_linesearch.<locals>.update_fn() missing 1 required "
        "keyword-only argument: 'value_fn'; of optax.lbfgs use lbfgs(learning_rate, "
        "linesearch=None)",
        said[5],  # names an address
        "JaxJob needs a loss function, but got a NoneType",
        "JaxJob needs parameters to train, but got none",
        "JaxJob needs parameters that are arrays of floats, but params['weight'] is int32; keep "
        "what is not trained out of params",
        "JaxJob needs parameters that are arrays of floats, but params['weight'] is float; keep "
        "what is not trained out of params",
        "JaxJob needs arrays of one length, the number of samples, but their shapes are [(3,), "
        "(4,)]",
        "JaxJob needs arrays of one length, the number of samples, but their shapes are []",
        "JaxJob needs micro_batch as a whole number of at least 1, but got 0",
        "Job needs batch as a whole number of at least 1, but got 0",
        "a batch policy needs to be one of constant, shrink, but got 'grow'",
        "JaxJob needs a batch of arrays of its 4 samples, but got one of shape (2, 3); step takes "
        "what the job handed out, which collate has made",
        "Job.step needs samples of a new step; call it once for each turn of the loop over the job",
        "the loop over a Job needs to call job.step once in each turn",
        "the loss function of a JaxJob needs to return losses that are floats, but returned int32",
        "JaxJob needs a tuple or dict of arrays, or a data set with len() and [], but got a zip; "
        "put the samples of a generator into a list",
        "JaxJob needs samples that are alike, or a collate function that makes a batch of them, "
        "but: all input arrays must have the same shape",
        "JaxJob needs samples of numbers, but batch[1] is of <U4; leave it out of the data set, or "
        "of what collate returns",
        "training needs at least one sample, but got 0",
        "Job needs steps as a whole number of at least 0, but got 2.5",
        "JaxJob needs the arrays of its parameters and of the optimizer's state, because a step "
        "may not count, but a function that the loop has called with them has used up their "
        "memory; leave out donate_argnums there, or pass copies",
        MIXED,
        MIXED,
        "JaxJob needs a loss of each sample that does not depend on its place in the batch, but "
        "that of sample 0 is another at another place; a chip may compute it at any; draw random "
        "numbers from the sample's own key (random_keys=True)",
        MIXED,
        None,
        MIXED,
        MIXED,
        "JaxJob needs an optimizer that steps with the gradients, the parameters and the loss "
        "(value) alone, but: a gradient of each sample is needed",
        KEYS,
        KEYS,
        "JaxJob needs samples of numbers, but batch[2] is of datetime64[s]; leave it out of the "
        "data set, or of what collate returns",
        *[STALE.format("outside")] * 4,
        None,
        None,
        STALE.format("rate"),
        None,
        None,
        STALE.format("an attribute of Task"),
        *[STALE.format(name) for name in ("numbers", "nested", "slotted", "Task")],
        *[STALE.format("an argument of scaled")] * 3,
        STALE.format("an attribute of Model"),
        None,
        "JaxJob needs a loss of each sample that does not depend on how many samples there are, "
        "but that of sample 0 is 0.148148 in a micro-batch and 0.444444 alone; divide no term by "
        "the size of the batch, which is here that of a micro-batch",
        KEPT.format("int32 of shape ()", "float32 of shape ()"),
        KEPT.format("float32 of shape ()", "float32 of shape (2,)"),
        "JaxJob needs an optimizer whose state keeps its structure, but init returned "
        "PyTreeDef({'kept': None}) and update PyTreeDef({'kept': *})",
        None,
        "JaxJob needs an optimizer that changes params['weight'], of shape (3,), by as many "
        "numbers, but got the shape (); it gets the mean gradient of all samples, and not the "
        "gradient of each",
        "JaxJob needs an optimizer that returns a tree of changes like the parameters, "
        "PyTreeDef({'weight': *}), but got PyTreeDef({})",
        "JaxJob needs an array of shape () and type int32 at "
        "[1].hyperparams['learning_rate'] of (params, opt_state), but the loop has put 0.5 there; "
        "what is to hold fractions begins as a float, such as 1.0",
        None,
        None,
        "JaxJob has parameters of float64, but jax_enable_x64 is off in this step; set it with "
        "jax.config.update, or put the loop into the block too",
        2.0,  # the second job compiles anew
    ]
    assert said[5].startswith("JaxJob needs an optimizer of optax, such as optax.adam(1e-3), but")


ASKING = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from meshmend.train import JaxJob

def losses(params, batch):
    return jnp.square(batch[0] @ params["weight"] - batch[1])

start = {"weight": np.zeros(3, np.float32)}
data = (np.arange(12, dtype=np.float32).reshape(4, 3) / 12, np.ones(4, np.float32))
optimizers = {
    "plateau": optax.chain(
        optax.sgd(0.3), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, atol=0.2)
    ),
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
    "polyak": optax.polyak_sgd(),
    "sam": optax.contrib.sam(optax.sgd(0.3), optax.sgd(0.1)),
}

def plainly(optimizer):
    params, state = start, optimizer.init(start)
    takes_value = optax.with_extra_args_support(optimizer)

    @jax.jit  # operation by operation, compiling would take most of the time
    def stepped(params, state):
        value, grads = jax.value_and_grad(lambda params: losses(params, data).mean())(params)
        try:
            changes, state = takes_value.update(grads, state, params, value=value)
        except TypeError:
            changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    for _ in range(12):
        params, state = stepped(params, state)
    return params

def by_a_job(optimizer):
    job = JaxJob(start, optimizer, losses, data, batch=4, steps=12)
    for batch in job:
        job.step(batch)
    return job.params

print(json.dumps({
    name: [run(each)["weight"].tolist() for run in (by_a_job, plainly)]
    for name, each in optimizers.items()
}))
"""


def test_optimizers_that_ask_for_the_loss_step_as_in_a_plain_loop(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ASKING)
    done = run_forked(str(script), imported=JAX)
    assert done.returncode == 0, done.stderr

    for by_a_job, plainly in json.loads(done.stdout).values():
        assert by_a_job == pytest.approx(plainly, abs=1e-5)


CALLS = """
import jax.numpy as jnp, numpy as np, optax
from meshmend.train import JaxJob

def losses(params, batch):
    return jnp.square(batch[0] @ params["weight"] - batch[1])

params = {"weight": np.ones(3, np.float32)}
data = (np.ones((10, 3), np.float32), np.ones(10, np.float32))
job = JaxJob(params, optax.sgd(0.1), losses, data, batch=4, steps=1000)
job.after_step(lambda job: print("after", job.step_number))
for batch in job:
    print(job.world_size, job.all_reduce({"a": jnp.ones(2), "n": len(batch[0])}))
    if job.step_number == 1 and job.rank == 1:
        job.stop()
    job.step(batch)
    print(job.gather([job.rank, "x"]))
"""


def test_chips_sum_and_gather_values_and_stop_together(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CALLS)

    done = meshmend_run("--elastic", "--mesh", "1x2", script)

    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line[0] == "["]
    values = ["2 {'a': array([2., 2.], dtype=float32), 'n': 4}", "[[0, 'x'], [1, 'x']]"]
    assert list(dict.fromkeys(lines)) == [values[0], "after 1", values[1], "after 2"]
    assert "2 steps; samples: 8 used, 0 lost, 0 repeated; replicas equal" in done.stderr


JOINING = """
import gc, json
from pathlib import Path
import jax, numpy as np, optax
from meshmend.train.jax.learner import JaxLearner
from meshmend.train.jax.program import FlatTree, jax_program
from meshmend.train.state.state_tree import ARRAYS

def mb(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

def learner(value):
    params = {f"w{at}": np.full((1 << 21,), value, np.float32) for at in range(8)}
    loss = lambda params, batch: batch
    program = jax_program(loss, optax.sgd(0.1, momentum=0.9), FlatTree.of(params), None)
    return JaxLearner(params, program, micro_batch=1)

def arrays(parts):
    for name, array in list(parts.items()):
        parts[name], memory = ARRAYS.room(str(array.dtype), array.shape, None)
        parts[name][...] = array

holder, own = learner(3.0), learner(5.0)
state = holder.state()
wanted = ARRAYS.digest(state)
state_mb = sum(array.nbytes for part in ("model", "optimizer") for array in state[part].values())
state_mb /= 1 << 20
gc.collect()
before = mb("VmRSS") - state_mb  # without the newcomer's own state
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
own.free()
for part in ("model", "optimizer"):
    arrays(state[part])
own.load(state)
print(json.dumps([(mb("VmHWM") - before) / state_mb, ARRAYS.digest(own.state()) == wanted]))
"""


def test_a_chip_that_joins_needs_the_memory_of_one_state() -> None:
    """It gives up its own arrays, which cannot be written over, and then what came, one by one."""
    done = run_program(JOINING, JAX)
    assert done.returncode == 0, done.stderr

    peak, is_equal = json.loads(done.stdout)
    assert is_equal
    assert peak < 1.6  # it was two to three


NOTES = """
import json
import jax, numpy as np, optax
from meshmend.train.data.samples import Share
from meshmend.train.jax.learner import JaxLearner
from meshmend.train.jax.program import FlatTree, jax_program

def loss(params, batch):
    return (batch @ params["w"])[:, 0] ** 2

def stepped(n_notes):
    params = {"w": np.ones((3, 1), np.float32)}
    program = jax_program(loss, optax.sgd(0.1), FlatTree.of(params, n_notes), None)
    learner = JaxLearner(params, program, micro_batch=2)
    learner.gather(np.arange(12, dtype=np.float32).reshape(4, 3), Share(0, 4, 4), is_last=True)
    before = learner.payload_hashes(0)
    learner.notes[:] = 7
    same = learner.payload_hashes(0) == before
    return [same, learner.is_last, learner.update(), np.asarray(learner.params["w"]).tolist()]

print(json.dumps([stepped(0), stepped(5)]))
"""


def test_numbers_of_the_job_in_a_sum_change_neither_step_nor_hash(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NOTES)
    done = run_forked(str(script), imported=JAX)

    assert done.returncode == 0, done.stderr[-2000:]
    without, with_notes = json.loads(done.stdout.splitlines()[-1])
    assert without == with_notes
    assert without[:2] == [True, True]
