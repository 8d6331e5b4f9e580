"""The commands `outerstep privacy` and `outerstep run privacy`."""

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from outerstep.cli.errors import UsageError, import_extra
from outerstep.cli.options import Connection, with_connection
from outerstep.cli.printing import Format, FormatOption, console, print_json, say_lines
from outerstep.cli.run.runs import RunArgument, read_spec
from outerstep.display import table
from protocol.messages import WorkerInfo
from protocol.spec.run import RunSpec
from protocol.spec.sections import PrivacySpec

WANTED = (1.0, 8.0)  # commonly regarded as strong protection, and as some protection
UNBOUNDED = "unbounded"


def preview(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The run spec; - reads it from stdin.")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the guarantee of a run spec's [privacy]: epsilon at its delta, by rounds. Nothing is started.

    It holds for a worker that contributes to every round, against anyone who sees its contributions, such as the
    coordinator. docs/privacy.md describes what it means and what it does not cover. Needs `pip install
    'outerstep[privacy]'`.

    \b
    Example:
      outerstep privacy run.toml
    """
    _, parsed = read_spec(spec)
    privacy = _privacy_of(parsed, f"{spec}")
    accountant = import_extra("outerstep.privacy", extra="privacy", command="outerstep privacy")
    rounds = parsed.sync.rounds
    found = {each: accountant.epsilon(privacy, each) for each in _milestones(rounds)}
    needed = {wanted: accountant.noise_multiplier(privacy, rounds, wanted) for wanted in WANTED}
    if output is Format.JSON:
        print_json(
            {
                "privacy": privacy,
                "rounds": [{"rounds": each, "epsilon": _finite(epsilon)} for each, epsilon in found.items()],
                "needed": [{"epsilon": wanted, "noise_multiplier": noise} for wanted, noise in needed.items()],
            }
        )
        return
    console().print(table([">rounds", ">epsilon"], [(str(each), _text(epsilon)) for each, epsilon in found.items()]))
    needed_text = ", ".join(f"{noise:.3g} for epsilon {wanted:g}" for wanted, noise in needed.items())
    say_lines(f"\nAt delta = {privacy.delta:g}. For {rounds} rounds you need a noise_multiplier of {needed_text}.")


@with_connection
def privacy(
    run: RunArgument,
    output: FormatOption = Format.TABLE,
    *,
    connection: Connection,
) -> None:
    """Show the privacy spent so far by each worker of a run with [privacy]: its contributions, and epsilon.

    The worker counts its contributions itself, including late ones and those resent after a kill; if the coordinator
    counted more, its number is used. docs/privacy.md describes what epsilon means and what it does not cover. Needs
    `pip install 'outerstep[privacy]'`.

    \b
    Example:
      outerstep run privacy my-run
    """
    with connection.open() as client:
        spec = _privacy_of(client.run(run).spec, f"the run {run}")
        workers = client.workers(run)
    accountant = import_extra("outerstep.privacy", extra="privacy", command="outerstep run privacy")
    counts = {each.name: _contributions(each) for each in workers}
    found = {name: accountant.epsilon(spec, count) for name, count in counts.items()}
    if output is Format.JSON:
        items = [
            {"worker": name, "contributions": count, "epsilon": _finite(found[name])} for name, count in counts.items()
        ]
        print_json({"privacy": spec, "workers": items})
        return
    rows = [(name, f"{count:g}", _text(found[name])) for name, count in counts.items()]
    console().print(table(["worker", ">contributions", f">epsilon at delta = {spec.delta:g}"], rows))


def _contributions(worker: WorkerInfo) -> float:
    return max(worker.metrics.private_contributions or 0.0, worker.contributions)


def _privacy_of(spec: RunSpec, where: str) -> PrivacySpec:
    if spec.privacy is None:
        raise UsageError(f"{where} has no [privacy]: nothing is clipped, no noise is added, and epsilon is unbounded")
    return spec.privacy


def _milestones(rounds: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, 20 … and `rounds`."""
    steps = (digit * 10**power for power, digit in product(range(len(str(rounds))), (1, 2, 5)))
    yield from (each for each in steps if each < rounds)
    yield rounds


def _text(epsilon: float) -> str:
    return UNBOUNDED if math.isinf(epsilon) else f"{epsilon:.3g}"


def _finite(epsilon: float) -> float | None:
    """Return epsilon for JSON, which has no infinity."""
    return None if math.isinf(epsilon) else epsilon
