"""The trainers of Hugging Face and Lightning survive a kill and take the chip back."""

import json
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from commanding import Ended, meshmend_run
from forked_script import TORCH, run_program

EXAMPLES = Path(__file__).parents[2] / "examples" / "train"
STRIKE = ("--inject", "kill 0,0 at 10", "--inject", "repair 0,0 at 20")  # the chip that leads

# The example with steps that wait, at step 30, until the chip that was struck is back.
GATED = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
import {module} as example

def wait(step):
    events = Path(os.environ["MESHMEND_JOB_DIR"], "events.jsonl")
    while step == 30 and events.read_text().count('"event":"arrived"') < 5:
        time.sleep(0.01)

{patch}
example.main()
"""
PATCH_OF = {
    "hf_trainer": """
class Gated(example.Trainer):
    def training_step(self, *arguments, **named):
        wait(self.state.global_step)
        return super().training_step(*arguments, **named)
example.Trainer = Gated""",
    "lightning_trainer": """
class Gated(example.Digits):
    def training_step(self, batch):
        wait(self.trainer.global_step)
        return super().training_step(batch)
example.Digits = Gated""",
}


STOP_OF = {
    "hf_trainer": """
class Stopping(example.Trainer):
    def _log_save_evaluate(self, *arguments):
        self.control.should_training_stop = self.state.global_step >= 12
        super()._log_save_evaluate(*arguments)
example.Trainer = Stopping""",
    "lightning_trainer": """
class Stopping(example.Digits):
    def on_train_batch_end(self, *arguments):
        self.trainer.should_stop = self.trainer.global_step >= 12
example.Digits = Stopping""",
}

ONE_STOPS_OF = {
    "hf_trainer": """
from transformers import TrainerCallback
class OutOfTime(TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        if os.environ["MESHMEND_CHIP"] == "1,1" and state.global_step == 12:
            control.should_training_stop = True
class Stopping(example.Trainer):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, callbacks=[OutOfTime()], **named)
example.Trainer = Stopping""",
    "lightning_trainer": """
class Stopping(example.Digits):
    def on_train_batch_end(self, *arguments):
        if os.environ["MESHMEND_CHIP"] == "1,1" and self.trainer.global_step == 12:
            self.trainer.should_stop = True
example.Digits = Stopping""",
    "lightning_trainer, by its own losses": """
class Stopping(example.Digits):
    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("own_loss", self.trainer.global_step + loss.detach())  # grows
        return loss
example.Digits = Stopping
from lightning.pytorch.callbacks import EarlyStopping
Trainer = example.lightning.Trainer
example.lightning.Trainer = lambda **named: Trainer(
    **named, callbacks=[EarlyStopping("own_loss", patience=0, check_on_train_epoch_end=True)])""",
}


def run_example(module: str, preload: str, folder: Path, *, patch: str = "") -> Ended:
    """Run an example on a 2x2 mesh, struck if it is patched; all files are inside the folder."""
    folder.mkdir()
    script = EXAMPLES / f"{module}.py"
    if patch:
        script = folder / "patched.py"
        script.write_text(GATED.format(folder=str(EXAMPLES), module=module, patch=patch))
    return meshmend_run(
        *("--elastic", "--mesh", "2x2", "--preload", preload, "--run-dir", folder / "run"),
        *(*(STRIKE if patch else ()), script, "--output", folder / "output"),
    )


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step that the leader told of."""
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return {each["step"]: each["loss"] for each in events if each["event"] == "step"}


def check_same_losses(usual: Path, struck: Path) -> None:
    ours, theirs = losses(struck), losses(usual)
    both = ours.keys() & theirs.keys()
    assert len(both) > min(len(ours), len(theirs)) / 2  # not every step is told of
    assert {step: ours[step] for step in both} == {
        step: pytest.approx(theirs[step], abs=1e-4) for step in both
    }


@pytest.mark.slow
def test_hugging_face_s_trainer_survives_a_kill_and_a_repair(tmp_path: Path) -> None:
    usual, struck = tmp_path / "usual", tmp_path / "a struck one"

    runs = [
        run_example("hf_trainer", "meshmend.train.hf", usual),
        run_example("hf_trainer", "meshmend.train.hf", struck, patch=PATCH_OF["hf_trainer"]),
    ]

    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert "samples: 1280 used, 0 lost, 0 repeated; replicas equal bit for bit" in runs[1].stderr
    check_same_losses(usual, struck)
    saved = json.loads((struck / "output" / "checkpoint-40" / "trainer_state.json").read_text())
    assert saved["global_step"] == 40
    assert [each["step"] for each in saved["log_history"] if "eval_loss" in each] == [20, 40]
    assert runs[1].stdout.count("'eval_loss'") == 2  # the chip that leads prints, alone


@pytest.mark.slow
def test_hugging_face_s_trainer_resumes_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    script = (EXAMPLES / "hf_trainer.py").read_text()
    resuming = tmp_path / "resuming.py"
    resuming.write_text(script.replace("trainer.train()", "trainer.train(True)"))
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    whole = run_example("hf_trainer", "meshmend.train.hf", first)

    part = meshmend_run(
        *(
            "--elastic",
            "--mesh",
            "1x4",
            "--preload",
            "meshmend.train.hf",
            "--run-dir",
            second / "run",
        ),
        *(resuming, "--output", _without_newest(first / "output", second / "output")),
    )

    assert (whole.returncode, part.returncode) == (0, 0), whole.stderr + part.stderr
    check_same_losses(first, second)
    assert min(losses(second)) > 20
    GPT2LMHeadModel.from_pretrained(second / "output" / "checkpoint-40")


# Whoever leads dies while it writes: in the middle of the job, and then after its last step.
DYING = """
import signal
class Dying(example.Trainer):
    def _save_optimizer_and_scheduler(self, folder):
        at = os.environ["MESHMEND_CHIP"], self.state.global_step
        if at in (("0,0", 20), ("0,1", 40)):
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(folder)
example.Trainer = Dying"""


@pytest.mark.slow
def test_a_checkpoint_of_hugging_face_s_trainer_is_whole_although_its_writer_died(
    tmp_path: Path,
) -> None:
    """The best model may be in it."""
    script, output = tmp_path / "patched.py", tmp_path / "output"
    script.write_text(GATED.format(folder=str(EXAMPLES), module="hf_trainer", patch=DYING))

    ended = meshmend_run(
        *("--elastic", "--mesh", "2x2", "--preload", "meshmend.train.hf"),
        *("--run-dir", tmp_path / "run", script, "--output", output),
    )

    assert ended.returncode == 0, ended.stderr
    assert "samples: 1280 used, 0 lost, 0 repeated; replicas equal bit for bit" in ended.stderr
    for step in (20, 40):
        state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["global_step"] == step
        assert (output / f"checkpoint-{step}" / "optimizer.pt").exists()


def _without_newest(folder: Path, copy: Path) -> Path:
    """Copy a folder of checkpoints; the newest lacks the file that is written last."""
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    (copy / "checkpoint-40" / "trainer_state.json").unlink()
    return copy


@pytest.mark.parametrize(("n_chips", "is_asked"), [(2, True), (4, False)])
def test_chips_are_asked_whether_to_stop_only_where_all_have_samples(
    n_chips: int, is_asked: bool
) -> None:
    """More chips may have come than a batch has samples; to ask them would end the job."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from meshmend.train.hf import Trainer

    asked: list[int] = []

    def all_reduce(flag: int) -> int:
        asked.append(flag)
        return 1

    job: Any = SimpleNamespace(world_size=n_chips, all_reduce=all_reduce)
    trainer: Any = SimpleNamespace(
        _batch=2,
        callback_handler=SimpleNamespace(callbacks=[SimpleNamespace()]),
        control=SimpleNamespace(should_training_stop=False),
    )

    assert Trainer._is_stopping(trainer, job) == is_asked
    assert asked == [0] * is_asked


def test_a_chip_that_joins_takes_over_what_a_script_has_logged() -> None:
    """Numbers of NumPy and tensors too, which plain `transformers` cannot save either."""
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from transformers import TrainerControl, TrainerState

    from meshmend.train.hf import _TrainerProgress

    def trainer(*logged: object) -> Any:
        return SimpleNamespace(
            state=TrainerState(log_history=[{"loss": each} for each in logged]),
            control=TrainerControl(),
            callback_handler=SimpleNamespace(callbacks=[]),
            _tr_loss=torch.tensor(0.5),
            _total_loss_scalar=0.0,
            _globalstep_last_logged=0,
            _begun_save=None,
        )

    holder, joining = trainer(np.float32(1.5), torch.tensor(2.5), 3.5), trainer()
    _TrainerProgress(joining, lambda _: None).load_state_dict(
        _TrainerProgress(holder, lambda _: None).state_dict()
    )

    assert [each["loss"] for each in joining.state.log_history] == [1.5, 2.5, 3.5]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("fp16=True", "does not support fp16: use bf16=True"),
        ("auto_find_batch_size=True", "does not support auto_find_batch_size"),
        ("lr_scheduler_type='reduce_lr_on_plateau'", "does not support lr_scheduler_type"),
        ("push_to_hub=True", "does not support push_to_hub"),
    ],
)
def test_hugging_face_s_trainer_refuses_in_one_line(argument: str, words: str) -> None:
    from meshmend.errors import InputError
    from meshmend.train.hf import refuse_unsupported

    class Arguments:
        fsdp = deepspeed = parallelism_config = None
        fp16 = auto_find_batch_size = push_to_hub = save_on_each_node = False
        lr_scheduler_type, train_sampling_strategy = "linear", "random"
        include_num_input_tokens_seen, n_gpu = "no", 0

    arguments = Arguments()
    name, _, value = argument.partition("=")
    setattr(arguments, name, {"True": True}.get(value, value.strip("'")))

    with pytest.raises(InputError, match=re.escape(words)):
        refuse_unsupported(arguments, [1], None)


def test_hugging_face_s_trainer_refuses_samples_that_a_method_of_a_script_chooses(
    tmp_path: Path,
) -> None:
    import torch
    from transformers import TrainingArguments

    from meshmend.errors import InputError
    from meshmend.train.hf import Trainer

    class Weighted(Trainer):
        def get_train_dataloader(self) -> object:
            raise AssertionError("the job would not have called it")

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Weighted(torch.nn.Linear(1, 1), arguments, train_dataset=[1, 2])

    words = "hands out the samples of train_dataset, but Weighted has get_train_dataloader of its"
    with pytest.raises(InputError, match=words):
        trainer.train()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("arguments", "loading", "words"),
    [
        ("callbacks=[callbacks.WeightAveraging()]", "", "does not support WeightAveraging: a chip"),
        ("callbacks=[callbacks.EMAWeightAveraging()]", "", "does not support EMAWeightAveraging"),
        (
            "callbacks=[callbacks.GradientAccumulationScheduler({1: 2})]",
            "",
            "does not support GradientAccumulationScheduler: a step sums over all chips",
        ),
        ("overfit_batches=2", "", "does not support overfit_batches"),
        ("reload_dataloaders_every_n_epochs=1", "", "got a second one"),
        (
            "",
            "sampler=data.WeightedRandomSampler(weights, 96)",
            "DataLoader's sampler WeightedRandomSampler; leave it out",
        ),
        ("", "sampler=data.RandomSampler(images, num_samples=9)", "sampler with num_samples"),
    ],
)
def test_lightning_s_trainer_refuses_in_one_line(
    tmp_path: Path, arguments: str, loading: str, words: str
) -> None:
    lightning = pytest.importorskip("lightning", reason="the extra lightning is not installed")
    from lightning.pytorch import callbacks
    from torch.utils import data

    from meshmend.errors import InputError
    from meshmend.train.lightning import MeshmendStrategy

    example = runpy.run_path(str(EXAMPLES / "lightning_trainer.py"))
    images = example["images_of_digits"](96)
    known = {"callbacks": callbacks, "data": data, "images": images, "weights": [1.0] * 96}
    named = {"max_epochs": 2, "logger": False, "default_root_dir": tmp_path}
    trainer = lightning.Trainer(
        strategy=MeshmendStrategy(), **named, **eval(f"dict({arguments})", known)
    )
    loader = data.DataLoader(images, batch_size=8, **eval(f"dict({loading})", known))

    with pytest.raises(InputError, match=words):
        trainer.fit(example["Digits"](), loader)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Lightning gives hints as warnings
def test_lightning_s_trainer_survives_a_kill_and_a_repair(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="the extra lightning is not installed")
    usual, struck = tmp_path / "usual", tmp_path / "a struck one"

    runs = [
        run_example("lightning_trainer", "lightning", usual),
        run_example("lightning_trainer", "lightning", struck, patch=PATCH_OF["lightning_trainer"]),
    ]

    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert "60 steps; samples: 1920 used, 0 lost, 0 repeated; replicas equal" in runs[1].stderr
    check_same_losses(usual, struck)
    ends = [re.findall(r"validation loss (\S+)", run.stdout) for run in runs]
    assert len(ends[0]) == len(ends[1]) == 1
    assert float(ends[0][0]) == pytest.approx(float(ends[1][0]), abs=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("module", "preload", "patch", "n_steps"),
    [
        ("hf_trainer", "meshmend.train.hf", STOP_OF["hf_trainer"], 12),
        ("hf_trainer", "meshmend.train.hf", ONE_STOPS_OF["hf_trainer"], 12),
        # A wish that a batch brings about travels with the sums of the next step.
        ("lightning_trainer", "lightning", STOP_OF["lightning_trainer"], 13),
        ("lightning_trainer", "lightning", ONE_STOPS_OF["lightning_trainer"], 13),
        # The second of two epochs of 15 steps has no smaller loss than the first.
        (
            "lightning_trainer",
            "lightning",
            ONE_STOPS_OF["lightning_trainer, by its own losses"],
            30,
        ),
    ],
)
def test_a_trainer_that_stops_early_does_so_on_all_chips(
    tmp_path: Path, module: str, preload: str, patch: str, n_steps: int
) -> None:
    pytest.importorskip(preload, reason="the extra lightning is not installed")

    ended = run_example(module, preload, tmp_path / "run", patch=patch)

    assert ended.returncode == 0, ended.stderr
    words = f"{n_steps} steps; samples: {32 * n_steps} used, 0 lost, 0 repeated; replicas equal"
    assert words in ended.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("module", "preload", "length", "n_steps"),
    [
        ("hf_trainer", "meshmend.train.hf", ("--steps", "20"), 20),
        ("lightning_trainer", "lightning", ("--epochs", "1"), 15),
    ],
)
def test_a_chip_that_computes_wrong_numbers_is_found_in_a_trainer_too(
    tmp_path: Path, module: str, preload: str, length: tuple[str, str], n_steps: int
) -> None:
    pytest.importorskip(preload, reason="the extra lightning is not installed")

    ended = meshmend_run(
        *("--elastic", "--mesh", "2x2", "--preload", preload, "--run-dir", tmp_path / "run"),
        *("--check-shares", "4", "--inject", "flip gradient 0,1 at 8"),
        *(EXAMPLES / f"{module}.py", *length, "--output", tmp_path / "output"),
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("turned away") == 1
    assert re.search(r"chip \(0, 1\) computed samples \d+ to \d+ of step 9 wrong", ended.stderr)
    assert f"{n_steps} steps; samples: {32 * n_steps} used, 0 lost, 0 repeated" in ended.stderr


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("hf", "transformers", "hf"), ("lightning", "lightning", "lightning")],
)
def test_without_the_package_the_module_says_what_to_install(
    module: str, package: str, extra: str
) -> None:
    program = (
        "import sys\n"
        f"sys.modules['{package}'] = None\n"
        "from meshmend.errors import InputError\n"
        "try:\n"
        f"    import meshmend.train.{module}\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    done = run_program(program, TORCH)

    assert (done.stderr, done.stdout) == (
        "",
        f"meshmend.train.{module} needs {package}, but it is not installed; run: pip install "
        f"'meshmend[{extra}]'\n",
    )
