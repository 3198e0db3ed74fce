"""`meshmend fabrics`."""

from dataclasses import asdict

from meshmend.cli.console import print_json
from meshmend.cli.options import JsonOption


def fabrics_command(as_json: JsonOption = False) -> None:
    """List the fabrics: the figures of each machine's network, and where they come from.

    **Examples**

    - meshmend fabrics

    - meshmend fabrics --json
    """
    from meshmend.topology.fabric import FABRICS

    if as_json:
        print_json({"fabrics": [asdict(fabric) for fabric in FABRICS.values()]})
        return
    for fabric in FABRICS.values():
        print(fabric)
        print(f"  usual mesh  {fabric.usual_mesh}")
        print(f"  source      {fabric.source}")
