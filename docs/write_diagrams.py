"""Write docs/diagrams, each drawn from the code: run `python -m docs.write_diagrams` in the repository.

A test fails while a diagram is not what this draws.
"""

from collections.abc import Callable
from pathlib import Path

from coordinator.run.decide import TRANSITIONS
from docs.vector_parts import contribution, spread
from outerstep.common.drawing import DOWN, INK, LINE, MEAN, QUIET, TRAIN, UP, Drawing
from outerstep.common.quantities import bytes_text
from outerstep.plan import Workload, contribution_bytes, delta_bytes, fragment_sizes, fragment_times
from protocol import wire
from protocol.spec.sections import SyncSpec
from worker.rounds.schedule import schedule

FOLDER = Path(__file__).parent / "diagrams"
MARGIN = 20.0


def fragment_states() -> str:
    """Draw the states of one fragment of a round, from the table of transitions."""
    width, gap, height = 130.0, 130.0, 40.0
    states = list(TRANSITIONS)
    place = {state: MARGIN + 60 + index * (width + gap) for index, state in enumerate(states)}
    top, middle = 30.0, 50.0
    drawing = Drawing(place[states[-1]] + width + 60 + MARGIN, 150, "The states of a fragment")
    drawing.arrow((MARGIN, middle), (place[states[0]], middle))
    drawing.words(MARGIN, top + 8, "opens", ink=QUIET)
    for state in states:
        drawing.box(place[state], top, width, height, "#eceef2", line=LINE)
        drawing.words(place[state] + width / 2, middle + 5, state, at="middle")
    for state, outcomes in TRANSITIONS.items():
        for what, following in outcomes.items():
            if place[following] > place[state]:
                drawing.arrow((place[state] + width, middle), (place[following], middle))
                between = (place[state] + width + place[following]) / 2
                drawing.words(between, middle - 8, what, ink=QUIET, at="middle")
            else:  # back, below
                start, end, low = place[state] + width / 2, place[following] + width / 2, top + height + 40
                drawing.arrow((start, top + height), (start, low), (end, low), (end, top + height))
                drawing.words((start + end) / 2, low + 18, what, ink=QUIET, at="middle")
    drawing.arrow((place[states[-1]] + width, middle), (place[states[-1]] + width + 50, middle))
    return drawing.svg()


H, FRAGMENTS = 12, 3
SCHEDULES = {
    "classic: the training stands still while fragments travel": SyncSpec(rounds=9, wait="always", inner_steps=H),
    "overlap = 5": SyncSpec(rounds=9, wait="always", inner_steps=H, overlap=5),
    'offsets = "spread", overlap = 3': SyncSpec(rounds=9, wait="always", inner_steps=H, overlap=3, offsets="spread"),
    'overlap = "eager"': SyncSpec(rounds=9, wait="always", inner_steps=H, overlap="eager"),
}
STANDSTILL = 3.0  # the drawn length of a classic sync, in inner steps; the real one depends on the line


def schedules() -> str:
    """Draw when, within a round, `schedule` sends and merges each fragment."""
    left, step, row, each = 110.0, 32.0, 16.0, 110.0
    drawing = Drawing(
        left + (H + STANDSTILL) * step + 190, MARGIN + each * len(SCHEDULES), "When fragments are sent and merged"
    )
    for index, (title, sync) in enumerate(SCHEDULES.items()):
        planned = schedule(sync, FRAGMENTS, H, last=False, first=False)
        top = MARGIN + each * index
        drawing.words(MARGIN, top + 6, title)
        for number in range(H):
            drawing.box(left + number * step + 1, top + 14, step - 2, row, TRAIN)
        drawing.words(MARGIN, top + 27, f"{H} inner steps", ink=QUIET, size=11)
        for p, (sent, merged) in enumerate(zip(planned.sent, planned.merged, strict=True)):
            y = top + 34 + p * (row + 3)
            start = left + sent * step
            length = (merged - sent) * step if planned.overlaps else STANDSTILL * step
            drawing.words(MARGIN, y + 12, f"fragment {p}", ink=QUIET, size=11)
            drawing.box(start, y, length, row, UP)
            inside = length > 200
            beside = start + 6 if inside else start + length + 6
            drawing.words(
                beside, y + 12, f"sent after {sent}, merged after {merged}", size=11, ink=INK if inside else QUIET
            )
    return drawing.svg()


WORKLOAD = Workload(parameters=60_000_000, up=10e6, down=25e6, step_s=1.0, workers=4, latency_s=0.04, steps=100_000)
CODEC = "int8"


def sync() -> str:
    """Draw one sync of all fragments, as `outerstep plan` computes it."""
    sizes = fragment_sizes(WORKLOAD.parameters, SyncSpec.model_fields["fragment_elements"].default)
    up = [contribution_bytes(CODEC, n, zstd=True) for n in sizes]
    down = [delta_bytes(CODEC, n, WORKLOAD.workers, zstd=True) for n in sizes]
    found = list(fragment_times(WORKLOAD, CODEC, CODEC, list(zip(sizes, up, down, strict=True))))
    end = max(each.stepped for each in found)
    mean_s = max(each.averaged - each.acknowledged for each in found)
    left, width, row = 110.0, 620.0, 15.0
    bottom = 44 + row * len(found)
    drawing = Drawing(left + width + MARGIN + 20, bottom + 40, "One sync of all fragments")
    title = (
        f"One sync of {WORKLOAD.parameters / 1e6:.0f} M parameters, {CODEC} both ways: {bytes_text(sum(up))} at "
        f"{WORKLOAD.up / 1e6:.0f} Mbit/s up, {bytes_text(sum(down))} at {WORKLOAD.down / 1e6:.0f} Mbit/s down"
    )
    drawing.words(MARGIN, 24, title)

    def x(seconds: float) -> float:
        return left + width * seconds / end

    begun = 0.0
    for index, each in enumerate(found):
        y = 40 + row * index
        drawing.words(MARGIN, y + 11, f"fragment {index}", ink=QUIET, size=10)
        drawing.box(x(begun), y, x(each.acknowledged) - x(begun), row - 3, UP)
        drawing.box(x(each.acknowledged), y, x(each.averaged) - x(each.acknowledged), row - 3, MEAN)
        drawing.box(x(each.averaged), y, x(each.stepped) - x(each.averaged), row - 3, DOWN)
        begun = each.acknowledged - WORKLOAD.latency_s  # the line is the next one's then
    for tick in range(0, int(end) - 2, 10):
        drawing.line((x(tick), 36), (x(tick), bottom), dashed=True)
        drawing.words(x(tick), bottom + 14, f"{tick} s", ink=QUIET, size=11, at="middle")
    drawing.words(x(end), bottom + 14, f"{end:.0f} s", size=11, at="middle")
    for place, (name, fill) in enumerate(
        (("up", UP), (f"the mean, {mean_s * 1000:.0f} ms", MEAN), ("down, outer step", DOWN))
    ):
        drawing.box(left + place * 150, bottom + 22, 10, 10, fill)
        drawing.words(left + place * 150 + 16, bottom + 31, name, ink=QUIET, size=11)
    return drawing.svg()


ELEMENTS = 2 * wire.CHUNK_ELEMENTS + 100_000


def payload() -> str:
    """Draw the parts of a real contribution and the byte at which each begins."""
    body = contribution(spread(ELEMENTS, 0))
    header = wire.Payload.from_bytes(body).header
    start = wire.PREFIX.size
    frames = [len(body) - sum(header.frame_bytes[index:]) for index in range(len(header.frame_bytes))]
    named = ["magic, version, header length", "header, msgpack", *(f"frame {p}" for p in range(len(frames)))]
    begins = [0, start, *frames]
    contents = [
        f"{wire.MAGIC.decode()} {wire.VERSION}",
        "round, fragment, codec, worker, units …",
        *(f"{n:,} elements, {CODEC}" for n in wire.chunk_sizes(ELEMENTS, wire.CHUNK_ELEMENTS)),
    ]
    row, left = 34.0, 90.0
    drawing = Drawing(720, MARGIN * 2 + row * len(named) + 20, "The parts of a payload")
    for index, (name, begin, what) in enumerate(zip(named, begins, contents, strict=True)):
        y = MARGIN + row * index
        size = [*begins, len(body)][index + 1] - begin
        drawing.words(left - 10, y + 21, f"{begin:,}", ink=QUIET, size=12, at="end")
        drawing.box(left, y, 600, row - 3, "#eceef2" if index < 2 else "#dfe4fb", line=LINE)
        drawing.words(left + 10, y + 21, name)
        drawing.words(left + 220, y + 21, what, ink=INK, size=12)
        drawing.words(left + 590, y + 21, f"{size:,} bytes", ink=QUIET, size=12, at="end")
    drawing.words(left - 10, MARGIN + row * len(named) + 14, f"{len(body):,}", ink=QUIET, size=12, at="end")
    return drawing.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {
    "fragment-states": fragment_states,
    "schedules": schedules,
    "sync": sync,
    "payload": payload,
}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.svg"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DIAGRAMS.items():
        path_of(name).write_text(draw(), encoding="utf-8")
