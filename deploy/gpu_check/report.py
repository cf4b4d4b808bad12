"""What was found, for people and as JSON. Records and tables; it measures nothing."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from deploy.gpu_check.measure import Equality, StepCost

GB = 10**9


class ModelReport(Struct, kw_only=True):
    """One model. It grows while the model is checked."""

    name: str
    parameters: int = 0  # of the denoiser
    default_steps: int = 0  # that `images_s` is for
    equality: Equality | None = None
    steps: list[StepCost] = []
    note: str = ""  # why it was not checked

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words."""
        return [] if self.equality is None else [f"{self.name}: {fault}" for fault in self.equality.faults]


class Report(Struct, kw_only=True):
    """A whole check."""

    device: str
    device_bytes: int | None
    dtype: str
    compiled: bool
    versions: dict[str, str]
    models: list[ModelReport] = []
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; nothing if all is well."""
        return [fault for model in self.models for fault in model.faults]


def show(report: Report, console: Console) -> None:
    """Prints it."""
    memory = "" if report.device_bytes is None else f", {report.device_bytes / GB:.0f} GB"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    compiled = ", compiled" if report.compiled else ""
    console.print(f"\n{report.device}{memory}; {report.dtype}{compiled}; {versions}; {report.seconds:.0f} s")
    for model in report.models:
        if model.note:
            console.print(f"\n{model.name}: {model.note}")
            continue
        if model.equality is not None:
            console.print(_equality_table(model.name, model.equality))
        console.print(_steps_table(model))
        for cost in model.steps:
            if cost.note:
                console.print(
                    f"{_size(cost.height, cost.width)}, {cost.requests} requests: {cost.note}", highlight=False
                )
    for fault in report.faults:
        console.print(f"FAULT: {fault}")
    if not report.faults and any(model.equality is not None for model in report.models):
        console.print("Whoever shares a batch gets the result that he gets alone, within the bounds.")


def write(report: Report, file: Path) -> None:
    """Writes it as JSON."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def _equality_table(name: str, equality: Equality) -> Table:
    sizes = ", ".join(_size(*size) for size in equality.sizes)
    title = f"\n{name}: {equality.requests} requests ({equality.rows} rows) of {sizes}, together and alone"
    table = Table("what", "found", "bound", title=title, title_justify="left")
    predictions = f"{equality.predictions} predictions, worst root mean square"
    table.add_row(predictions, f"{equality.worst_rms:.2g}", f"{equality.bound:.2g}")
    table.add_row("the same, largest over largest", f"{equality.worst_max:.2g}", "")
    picture = f"{equality.worst_picture_mean:.2f}/255"
    table.add_row("pictures, worst mean difference", picture, f"{equality.picture_bound:g}/255")
    table.add_row("the same, largest", f"{equality.worst_picture_max}/255", "")
    least = f"at least {equality.least_seen:.2g}"
    table.add_row("a row with another's text, for comparison", f"{equality.another_text:.2g}", least)
    table.add_row("a row with another's timestep, for comparison", f"{equality.another_timestep:.2g}", least)
    return table


def _steps_table(model: ModelReport) -> Table:
    billions = f"{model.parameters / 1e9:.3g} billion parameters"
    title = f"\n{model.name}, {billions}: steps with guidance, images/s at {model.default_steps} steps"
    table = Table(title=title, title_justify="left")
    for column in ("size", "requests", "rows", "step ms", "images/s", "decode ms", "peak GB"):
        table.add_column(column, justify="right")
    for cost in model.steps:
        if not cost.note:
            table.add_row(_size(cost.height, cost.width), str(cost.requests), str(cost.rows), *_figures(cost))
    return table


def _size(height: int, width: int) -> str:
    return f"{width}x{height}"


def _figures(cost: StepCost) -> Iterator[str]:
    for value, form in ((cost.step_ms, ".1f"), (cost.images_s, ".3g"), (cost.decode_ms, ".0f")):
        yield "" if value is None else format(value, form)
    yield "" if cost.peak_bytes is None else f"{cost.peak_bytes / GB:.1f}"
