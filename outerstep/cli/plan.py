"""The command `outerstep plan`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from outerstep import plan as planning
from outerstep.cli.errors import UsageError, import_extra
from outerstep.cli.printing import UNBOUNDED_WIDTH, Format, FormatOption, console, print_json, say_lines
from outerstep.cli.run.runs import read_text
from outerstep.common.quantities import (
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    parse_bytes,
    parse_count,
    parse_rate,
    parse_seconds,
    share_text,
)
from outerstep.display import table
from outerstep.epochs import EPOCHS, schedule_of
from outerstep.plan import Setting, Workload
from outerstep.plan_boxes import Together, parse_box, together
from protocol.errors import SpecError
from protocol.spec.sections import MOST_ROUNDS
from worker.memory import LIBRARIES_BYTES, ROOM, Need, Sizes, needs

LEAST_STEP_S = 1e-6
WORKERS, LATENCY, STEPS, UTILISATION = 4, "40ms", "20000", 0.9


def plan(
    params: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Trainable parameters: 1.2e9, 150M, 1.2B.")
    ] = None,
    up: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="A worker's upload rate to the coordinator, or its limit: 10mbit."),
    ] = None,
    down: Annotated[str | None, typer.Option(metavar="RATE", help="A worker's download rate.")] = None,
    step_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time of one inner step: 1.0 (seconds), 350ms.")
    ] = None,
    box: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEED,DOWN/UP",
            help="Show instead what this box and others add, with --params and the --step-time of the fastest: its "
            "relative speed and its line in Mbit/s, 0.5,100/10. Repeat it for each box.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Show instead which settings of the worker fit --params into a device with so much memory: 24gb.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="With --memory: the memory of the GPU's host. Default: the device is a CPU."
        ),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            metavar="SPEC.toml",
            help="Show instead how many rounds the training set of this run spec gives, for --workers and --epochs. "
            "The spec may leave out sync.rounds.",
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(min=0.01, max=10_000.0, help="With --spec: how often each sequence is trained on. Default: 3."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Number of workers, each with these rates. Default: 4.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"Round-trip time to the coordinator. Default: {LATENCY}.")
    ] = None,
    loss: Annotated[
        float | None, typer.Option(min=0.0, max=0.1, help="Share of packets lost: 0.005. Default: 0.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT", help=f"Inner steps of the whole run; more rounds lose less quality. Default: {STEPS}."
        ),
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help=f"Target share of the time in inner steps. Default: {UTILISATION}."),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Estimate what a run costs on given network connections, and recommend codecs and H. Nothing is started.

    For every pair of codecs it shows bytes and seconds per sync, and for several H (inner steps per round) the share of
    time in inner steps and how many times fewer bytes move than with per-step fp32 all-reduce. docs/performance.md has
    the model, its sources, and a comparison with measured runs.

    \b
    Example:
      outerstep plan --params 1.2e9 --up 10mbit --down 100mbit --step-time 1.0
      outerstep plan --params 1.2e9 --step-time 1.0 --box 1.0,100/10 --box 0.5,50/5
      outerstep plan --spec run.toml --workers 4 --epochs 3
      outerstep plan --params 1.2e9 --memory 24gb --host-memory 64gb
    """
    lines: dict[str, object] = {"--latency": latency, "--loss": loss}
    run: dict[str, object] = {"--steps": steps, "--utilisation": utilisation}
    network: dict[str, object] = {"--up": up, "--down": down, "--step-time": step_time, **lines, **run}
    if host_memory is not None and memory is None:
        raise UsageError("--host-memory needs --memory, which the GPU has")
    if memory is not None:
        others: dict[str, object] = {"--spec": spec, "--epochs": epochs, "--box": box, "--workers": workers}
        _refuse("--memory needs no network and no data", network | others)
        if params is None:
            raise UsageError("--memory needs --params, the number of trained parameters")
        _plan_memory(
            _parsed("--params", parse_count, params),
            _parsed("--memory", parse_bytes, memory),
            None if host_memory is None else _parsed("--host-memory", parse_bytes, host_memory),
            output,
        )
        return
    if spec is not None:
        _refuse("--spec needs no network", network | {"--params": params, "--box": box})
        _plan_epochs(spec, workers or WORKERS, EPOCHS if epochs is None else epochs, output)
        return
    if epochs is not None:
        raise UsageError("--epochs needs --spec")
    if box is not None:
        _refuse("each --box has its line", {"--up": up, "--down": down, "--workers": workers})
        _refuse("what boxes add is known only with the default settings", run)
        if params is None or step_time is None:
            raise UsageError("--box needs --params and the --step-time of the fastest box")
        _plan_boxes(
            together(
                _parsed("--params", parse_count, params),
                _parsed("--step-time", partial(parse_seconds, least=LEAST_STEP_S), step_time),
                [_parsed("--box", parse_box, each) for each in box],
                _parsed("--latency", parse_seconds, LATENCY if latency is None else latency),
                loss or 0.0,
            ),
            output,
        )
        return
    if params is None or up is None or down is None or step_time is None:
        raise UsageError("give --params, --up, --down and --step-time; or --box; or --params and --memory; or --spec")
    workload = Workload(
        parameters=_parsed("--params", parse_count, params),
        up=_parsed("--up", parse_rate, up),
        down=_parsed("--down", parse_rate, down),
        step_s=_parsed("--step-time", partial(parse_seconds, least=LEAST_STEP_S), step_time),
        workers=workers or WORKERS,
        latency_s=_parsed("--latency", parse_seconds, LATENCY if latency is None else latency),
        steps=_parsed("--steps", parse_count, STEPS if steps is None else steps),
        loss=loss or 0.0,
    )
    found = planning.settings(workload)
    best, reason = planning.recommend(found, UTILISATION if utilisation is None else utilisation)
    if output is Format.JSON:
        print_json(_document(workload, found, best, reason))
        return
    console(width=UNBOUNDED_WIDTH).print(_table(found))  # a narrow terminal wraps it instead of cutting it
    say_lines("\n" + "\n".join(_lines(workload, best, reason)))


def _refuse(why: str, given: Mapping[str, object]) -> None:
    """Raise UsageError if any of these options was given: it would have no effect."""
    if unused := [flag for flag, value in given.items() if value is not None]:
        raise UsageError(f"{why}: leave out {', '.join(unused)}")


def _plan_memory(parameters: int, memory: int, host_memory: int | None, output: Format) -> None:
    """Show what the worker's settings need for a model of this size, and which is the first that fits."""
    found = needs(Sizes(parameters), on_gpu=host_memory is not None)
    fitting = next((each for each in found if each.fits(memory, host_memory)), None)
    if output is Format.JSON:
        rows = [
            asdict(each) | {"settings": each.settings._asdict(), "options": each.settings.options}
            | {"device": each.device, "host": each.host, "fits": each.fits(memory, host_memory)}
            for each in found
        ]  # fmt: skip
        print_json({"settings": rows, "options": None if fitting is None else fitting.settings.options})
        return
    columns = ["settings", ">parameters", ">gradients", ">moments", ">outer state", ">work"]
    columns += [">on the device", ">in host memory"] if host_memory is not None else [">in all"]
    cells = [
        (
            each.settings.options or "defaults",
            *map(bytes_text, (each.parameters, each.gradients, each.moments, each.outer_state, each.work)),
            *map(bytes_text, (each.device, each.host) if each.on_gpu else (each.device,)),
            "yes" if each.fits(memory, host_memory) else "no",
        )
        for each in found
    ]
    console(width=UNBOUNDED_WIDTH).print(table([*columns, "fits"], cells))
    say_lines("\n" + "\n".join(_memory_lines(found[-1], fitting)))


def _memory_lines(leanest: Need, fitting: Need | None) -> list[str]:
    where = (
        "On the GPU: parameters, gradients and moments. In host memory: the outer state and the work to send. With "
        "--offload, gradients and moments are in host memory, and the rest of that is in files."
        if leanest.on_gpu
        else "All of it is in host memory. On Linux, the outer state and the work to send are in files, in the state "
        "directory."
    )
    libraries = f"the worker's libraries take {bytes_text(LIBRARIES_BYTES)} of host memory"
    lines = [where, f"At most {ROOM:.0%} of the memory is planned, since activations need the rest; {libraries}."]
    if fitting is None:
        host = f" and {bytes_text(leanest.host / ROOM)} of host memory" if leanest.on_gpu else ""
        return [
            *lines,
            f"Nothing fits. The least is {bytes_text(leanest.device / ROOM)}{host}: share the model among GPUs "
            '(--gpus, --parallel fsdp), or train adapters ([model.lora], base = "nf4").',
        ]
    lines.append(f"The worker's state directory takes up to {bytes_text(fitting.disk)} of disk.")
    if not fitting.settings.options:
        return [*lines, "The worker's defaults fit."]
    return [*lines, f"Start the worker with: {fitting.settings.options}, or with --fit auto"]


def _plan_boxes(found: Together, output: Format) -> None:
    """Show what each box adds."""
    if output is Format.JSON:
        print_json(asdict(found))
        return
    columns = ["box", ">speed", ">Mbit/s", ">steps", ">sync", ">training", ">tokens", ">time without it"]
    rows = [
        (
            str(number),
            f"{each.box.speed:g}",
            f"{each.box.down / 1e6:g}/{each.box.up / 1e6:g}",
            str(each.inner_steps),
            duration_text(each.sync_s),
            share_text(each.training),
            share_text(each.tokens),
            UNKNOWN if each.without is None else f"{each.without:.2f}",
        )
        for number, each in enumerate(found.boxes, 1)
    ]
    console(width=UNBOUNDED_WIDTH).print(table(columns, rows))
    round_text = f"A round is {found.inner_steps} steps of the fastest box, {duration_text(found.round_s)}"
    lines = [
        f"{round_text}. Each box does what it manages meanwhile (steps), and, if its memory suffices, trains on "
        f"during its sync, for up to {MOST_ROUNDS} rounds' time.",
        f"Together they reach the loss of the fastest box alone in about {found.time:.2f} of its time; the last column "
        "is that figure without the box. It is fitted to small models: runs were within 7 % of it without a line, and "
        "within 10 % with syncs of a tenth of a round. Longer syncs cost more, since a box trains on without the "
        "others' work meanwhile.",
    ]
    if any(each.training < 1 for each in found.boxes):
        least = max(each.sync_s for each in found.boxes) / found.round_s * found.inner_steps / MOST_ROUNDS
        lines.append(
            "A box that trains for less than 100 % waits for its line; with sync.inner_steps = "
            f"{math.ceil(least)} none would."
        )
    say_lines("\n" + "\n".join(lines))


def _plan_epochs(spec: Path, workers: int, epochs: float, output: Format) -> None:
    """Show how many rounds the training set of a spec gives."""
    import_extra("worker.data.open_training_set", extra="worker", command="outerstep plan --spec")
    try:
        schedule = schedule_of(read_text(spec), workers, epochs)
    except (SpecError, ValueError) as error:
        raise SpecError(f"{spec}: {error}") from error
    if output is Format.JSON:
        print_json(asdict(schedule) | {"units_per_epoch": schedule.units_per_epoch})
        return
    say_lines("\n".join(schedule.explained()))
    for section, keys in schedule.keys().items():
        say_lines(f"\n[{section}]\n" + "\n".join(f"{key} = {value}" for key, value in keys.items()))


def _parsed(flag: str, parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from error


def _document(workload: Workload, found: Sequence[Setting], best: Setting, reason: str) -> dict[str, Any]:
    allreduce = {
        "bytes": planning.allreduce_bytes(workload.workers, workload.parameters, 1),
        "seconds": planning.allreduce_seconds(workload),
    }
    return {
        "given": asdict(workload),
        "settings": [_flat(each) for each in found],
        "recommended": _flat(best),
        "reason": reason,
        "allreduce_per_step": allreduce,
    }


def _flat(setting: Setting) -> dict[str, Any]:
    fields = asdict(setting)
    cost = fields.pop("cost")
    return {**cost, "codec_loss": cost["loss"], **fields}


def _table(found: Sequence[Setting]) -> Any:
    """Return a table with a row per pair of codecs, and the utilisation and the factor for each H."""
    rows = []
    for start in range(0, len(found), len(planning.INNER_STEPS)):
        row = found[start : start + len(planning.INNER_STEPS)]
        each = row[0].cost
        rows.append(
            (
                each.upload_codec,
                each.download_codec,
                bytes_text(each.upload_bytes),
                bytes_text(each.download_bytes),
                duration_text(each.sync_s),
                UNKNOWN if each.loss is None else f"{each.loss:.4f}",
                *(f"{setting.utilisation:.0%} {count_text(setting.factor).replace(' ', '')}×" for setting in row),
            )
        )
    columns = ["up", "down", ">bytes up", ">bytes down", ">sync", ">loss"]
    return table([*columns, *(f">H = {h}" for h in planning.INNER_STEPS)], rows)


def _lines(workload: Workload, best: Setting, reason: str) -> list[str]:
    allreduce_s = planning.allreduce_seconds(workload)
    cost = best.cost
    hub = [workload.workers * 8 * moved / cost.sync_s for moved in (cost.upload_bytes, cost.download_bytes)]
    return [
        "For each H: the share of time in inner steps, and how many times fewer bytes than per-step fp32 all-reduce by "
        f"{workload.workers} workers.",
        f"All-reduce would take {duration_text(allreduce_s)} per step on this connection: "
        f"{workload.step_s / (workload.step_s + allreduce_s):.1%} of the time in inner steps.",
        f"The coordinator needs {count_text(hub[0])}bit/s in and {count_text(hub[1])}bit/s out during a sync.",
        "",
        f"Recommended: {planning.name(best)}: {duration_text(cost.sync_s)} of sync per "
        f"{duration_text(best.inner_steps * workload.step_s)} of inner steps, {best.utilisation:.1%}.",
        reason,
        _overlap_line(workload, best),
    ]


def _overlap_line(workload: Workload, best: Setting) -> str:
    if best.overlap is None:
        return "Its sync takes longer than its inner steps. Workers train on meanwhile, for up to four rounds' steps."
    wanted = f'"{best.overlap}"' if isinstance(best.overlap, str) else f"{best.overlap} or more"
    return (
        "Workers whose memory suffices train on during the sync, so it costs no time. In a run with sync.wait = "
        f'"always" that needs sync.overlap = {wanted}.'
    )
