"""`meshmend checkpoint`: the checkpoints of a run, for people and for other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshmend.cli.console import check_writable, print_json
from meshmend.cli.options import JsonOption, command_group
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.train.state.checkpoint import Loaded
    from meshmend.train.state.checkpoint_export import Exported

_OTHER_KINDS = frozenset([".bin", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pt", ".pth"])

app = command_group(
    "The checkpoints of a run: list them, check them, and write them for other programs.",
    start_with="checkpoint export RUN -o model.safetensors",
)

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The folder of a run, or the folder in which its checkpoints are.",
    ),
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", metavar="N", min=0, help="The step; else the newest that is complete."),
]


@app.command("list")
def list_command(run: RunArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, the oldest first; looks at the names of files only.

    **Examples**

    - meshmend checkpoint list runs/one

    - meshmend checkpoint list runs/one/checkpoints --json
    """
    from meshmend.train.state.checkpoint_export import listed
    from meshmend.units import format_bytes

    found = listed(run)
    if as_json:
        print_json({"checkpoints": [each.as_dict() for each in found]})
        return
    for each in found:
        size, shards = format_bytes(each.n_bytes), f"{each.n_shards} shards"
        state = "complete" if each.is_complete else f"not complete: {each.missing}"
        print(f"step {each.step:8d}  {each.framework:5}  {shards:>10}  {size:>10}  {state}")


@app.command("check")
def check_command(run: RunArgument, step: StepOption = None, as_json: JsonOption = False) -> int:
    """Read every complete checkpoint of a run, or one of them, and compare its checksums.

    The exit code is 1 if one is damaged. Those that are not complete are not read: no job would.

    **Examples**

    - meshmend checkpoint check runs/one

    - meshmend checkpoint check runs/one --step 50
    """
    from meshmend.train.state.checkpoint_export import checked

    results = checked(run, step)
    if as_json:
        found = [{"step": each.step, "damage": each.damage or None} for each in results]
        print_json({"checkpoints": found})
    else:
        for each in results:
            print(f"step {each.step}: {each.damage or 'whole'}")
    return 1 if any(each.damage for each in results) else 0


@app.command("export")
def export_command(
    run: RunArgument,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="A file that ends with .safetensors, or a folder, for shards with an index.",
        ),
    ],
    *,
    step: StepOption = None,
    what: Annotated[
        str,
        typer.Option("--what", metavar="PART", help="model, or all: with optimizer and progress."),
    ] = "model",
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="safetensors, or dcp: a folder that torch.distributed.checkpoint reads, with all.",
        ),
    ] = "safetensors",
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard-size", metavar="SIZE", help="The most that a file in a folder holds."
        ),
    ] = "5GB",
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint for other programs, such as transformers, safetensors or plain PyTorch.

    It needs no job and no GPU; the run may still be going on. Tensors have the names of the
    model's state_dict. A folder with a config.json beside the shards is what transformers'
    from_pretrained reads.

    **Examples**

    - meshmend checkpoint export runs/one -o model.safetensors

    - meshmend checkpoint export runs/one -o model --step 50 --shard-size 2GB

    - meshmend checkpoint export runs/one -o dcp --format dcp
    """
    from meshmend.train.state.checkpoint_export import export_safetensors, read_checkpoint
    from meshmend.units import format_bytes, parse_bytes

    if what not in ("model", "all"):
        raise InputError(f"--what needs model or all, but got {what!r}")
    if format_ not in ("safetensors", "dcp"):
        raise InputError(f"--format needs safetensors or dcp, but got {format_!r}")
    most = parse_bytes(shard_size)
    _check_output(output, format_)
    loaded = read_checkpoint(run, step)
    if format_ == "dcp":
        done = _export_dcp(loaded, output)
    else:
        done = export_safetensors(loaded, output, what=what, shard_bytes=most)
    if as_json:
        print_json(_as_dict(done))
        return
    size = format_bytes(done.n_bytes)
    print(f"step {done.step}: {done.n_tensors} tensors, {size}, in {output}")


@app.command("import")
def import_command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DCP", help="What torch.distributed.checkpoint wrote."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="The folder of checkpoints to resume from."
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="The steps done, if DCP does not say it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a checkpoint that a job resumes from out of one of torch.distributed.checkpoint.

    It needs the parts model and optimizer, as state_dict() returns them.

    **Examples**

    - meshmend checkpoint import dcp -o checkpoints

    - meshmend checkpoint import dcp -o checkpoints --step 1000
    """
    from meshmend.train.state.dcp_files import import_dcp

    file = import_dcp(folder, output, step=step)
    if as_json:
        print_json({"file": str(file)})
    else:
        print(f"wrote {file}")


def _check_output(output: Path, format_: str) -> None:
    """Raise InputError if the name promises another kind of file, or cannot be written."""
    if output.suffix == ".safetensors" and format_ == "dcp":
        raise InputError(f"--format dcp writes a folder, but -o names a file: {output.name}")
    if output.suffix.lower() in _OTHER_KINDS:
        raise InputError(
            f"-o needs a name such as {output.stem}.safetensors, or a folder, but got {output.name}"
        )
    check_writable(output if output.suffix == ".safetensors" else output / "index")


def _export_dcp(loaded: "Loaded", output: Path) -> "Exported":
    from meshmend.train.state.checkpoint_export import Exported

    if loaded.framework != "torch":
        raise InputError("--format dcp needs a checkpoint of PyTorch, but this one is of JAX")
    from meshmend.train.state.dcp_files import write_dcp
    from meshmend.train.state.state_tree import RawArray, map_state
    from meshmend.train.state.torch_state import TORCH, tensors_of

    state = map_state(
        lambda leaf: TORCH.tensor(leaf) if isinstance(leaf, RawArray) else leaf, loaded.state
    )
    write_dcp(state, output)
    tensors = list(tensors_of(state))
    files = tuple(sorted(output.iterdir()))
    return Exported(loaded.step, files, len(tensors), sum(tensor.nbytes for tensor in tensors))


def _as_dict(done: "Exported") -> dict[str, Any]:
    return {
        "step": done.step,
        "files": [str(file) for file in done.files],
        "tensors": done.n_tensors,
        "bytes": done.n_bytes,
    }
