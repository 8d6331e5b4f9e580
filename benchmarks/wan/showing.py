"""The tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.lines import FRAMING, LEAST_QUEUE_S, MTU, TCP_PAYLOAD

CONSOLE = Console(width=240)
LIMIT = (
    f"limit: the slower way's payload × {MTU + FRAMING}/{TCP_PAYLOAD}, the heads of full packets, Ethernet's {FRAMING} "
    f"bytes among them, at its rate; queues of a round trip's bytes, at least {1000 * LEAST_QUEUE_S:.0f} ms"
)


def show(
    syncs: Sequence[dict[str, Any]], training: Sequence[dict[str, Any]], changes: Sequence[dict[str, Any]]
) -> None:
    if syncs:
        CONSOLE.print(_syncs(syncs))
        CONSOLE.print(LIMIT, highlight=False)
        for row in syncs:
            for name, other in row["others"].items():
                if other["remark"]:
                    CONSOLE.print(f"{row['row']}: {name} {other['remark']}", highlight=False)
    if training:
        CONSOLE.print(_training(training))
        for each in training:
            stages = ", ".join(f"{name} {s:.2f}" for name, s in each["stages_s"].items() if name != "train")
            CONSOLE.print(f"{each['kind']}: s per round, some at the same time: {stages}", highlight=False)
    if changes:
        CONSOLE.print(_changes(changes))


def _syncs(rows: Sequence[dict[str, Any]]) -> Table:
    first, syncs = rows[0], len(rows[0]["sync_s"])
    table = Table(
        *("row", "line down/up", "ms", "loss", "TCP", "parameters, codecs", "MB up, down", "on the wire"),
        *("limit s", "plain TCP s", "sync s, worst", "planner", "core-s", "ratio", "excess rt"),
        *(f"{name} s, ×" for name in first["others"]),
        *("target", "verdict"),
        title=f"one sync, workers: {first['workers']}; {syncs} syncs, each after {first['silence_s']:g} s of silence",
    )
    for r in rows:
        payload, wire = r["payload_bytes"], r["wire_bytes"]
        table.add_row(
            *(r["row"], f"{r['down_mbit']:g}/{r['up_mbit']:g}", f"{1000 * r['round_trip_s']:.0f}", f"{r['loss']:.1%}"),
            r["tcp"] + (", TLS" if r["tls"] else ""),
            f"{r['parameters'] / 1e6:g} M {r['upload']}/{r['download']}",
            *(f"{each['up'] / 1e6:.2f}, {each['down'] / 1e6:.2f}" for each in (payload, wire)),
            *(f"{r['limit_s']:.2f}", f"{max(r['plain_s'].values()):.2f}", f"{r['median_s']:.2f}, {r['worst_s']:.2f}"),
            f"{r['planned_s']:.2f}, {r['planned_s'] / r['median_s'] - 1:+.0%}",
            f"{r['core_s']:.1f}",
            *(f"{r['ratio']:.2f}", f"{r['excess_round_trips']:.1f}"),
            *(_other(r["others"][name]["sync_s"], r["median_s"]) for name in first["others"]),
            *(r["target"], "missed: " + "; ".join(r["missed"]) if r["missed"] else "met"),
        )
    return table


def _other(other_s: float | None, sync_s: float) -> str:
    return "–" if other_s is None else f"{other_s:.1f}, {other_s / sync_s:.1f}"


def _training(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        *("training", "line down/up", "ms", "parameters", "inner steps s per round", "overlap s", "other s", "share"),
        *("target", "verdict"),
    )
    for r in rows:
        table.add_row(
            *(r["kind"], f"{r['down_mbit']:g}/{r['up_mbit']:g}", f"{1000 * r['round_trip_s']:.0f}"),
            *(f"{r['parameters'] / 1e6:g} M", f"{r['round_s']:.1f}", f"{r['overlap_s']:.1f}", f"{r['sync_s']:.2f}"),
            *(f"{r['share_in_steps']:.2%}", f"≥ {r['target']:.1%}"),
            "met" if r["share_in_steps"] >= r["target"] else "missed",
        )
    return table


def _changes(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        *("row", "one line, in a sync", "undisturbed s", "floor s", "sync s", "MB up, down", "sent again"),
        title="floor: what the line still carries, at the pace of the undisturbed sync",
    )
    for r in rows:
        payload, again = (r[f"{kind}_bytes"] for kind in ("payload", "repeated"))
        table.add_row(
            *(r["row"], r["change"], *(f"{r[key]:.2f}" for key in ("undisturbed_s", "floor_s", "sync_s"))),
            *(f"{each['up'] / 1e6:.2f}, {each['down'] / 1e6:.2f}" for each in (payload, again)),
        )
    return table
