"""The moving picture of a run: valid, without scripts, and true to its generations."""

from xml.etree import ElementTree

from meshmend.pages.draw.svg import FAILED_FILL
from meshmend.pages.report.training_run import training_run
from moving_picture import moving_svg
from training_events import lines, short_run

SVG = "{http://www.w3.org/2000/svg}"


def test_chips_are_red_while_they_are_not_in_the_generation() -> None:
    run = training_run(lines(short_run()))

    root = ElementTree.fromstring(moving_svg(run))

    boxes = [each for each in root.iter(f"{SVG}rect") if each.get("rx") == "4"]
    assert len(boxes) == run.mesh.n_chips
    fills = [box.find(f"{SVG}animate") for box in boxes]
    for place, generation in enumerate(run.generations):
        red = sum(
            fill is not None and fill.get("values", "").split(";")[place] == FAILED_FILL
            for fill in fills
        )
        assert red == run.mesh.n_chips - len(generation.chips)
    times = {each.get("keyTimes") for each in root.iter(f"{SVG}animate")}
    assert all(time and time.startswith("0") for time in times)
    assert not [each for each in root.iter() if each.tag.endswith(("script", "image"))]
