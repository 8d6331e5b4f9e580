"""The commands `outerstep run watch` and `outerstep run events`."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Annotated

import typer

from outerstep.cli.connection import DEFAULT_URL, CaOption, TokenFileOption, TokenOption, UrlOption, operator_client
from outerstep.cli.printing import (
    Format,
    FormatOption,
    LinesFormatOption,
    console,
    print_json,
    print_json_line,
    say,
    time_text,
)
from outerstep.cli.run import RunArgument
from outerstep.follow import follow
from outerstep.picture import display_for
from protocol.messages import Event

WATCH_PATIENCE_S = 2.0  # the workers' own figures change without an event
EVENTS_PATIENCE_S = 30.0
KIND_WIDTH = 20  # of the longest kinds


def watch(
    run: RunArgument,
    output: LinesFormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Follow a run's rounds and events until it ends; a restart of the coordinator is waited for.

    On a terminal it is a picture that changes: what the open round waits for, and until when; the losses; the workers,
    the hindmost first, each with its stage, the rounds that it is behind, its speed, when it was last heard of, and
    its bytes. Otherwise a line for each round and event. Ctrl-C ends the watching, not the run.

    As JSON: a line each time that something has happened, with run and workers as they are then, the rounds that were
    open or still to come before, the events since, and, while the coordinator cannot be asked, the trouble.

    \b
    Example:
      outerstep run watch my-run
    """
    with operator_client(url, token, token_file, ca) as client:
        looks = follow(client, run, patience_s=WATCH_PATIENCE_S, sleep=time.sleep)
        if output is Format.JSON:
            for look in looks:
                told = {"run": look.run, "rounds": look.rounds, "workers": look.workers, "events": look.events}
                print_json_line({**told, "trouble": look.trouble})
            return
        with display_for(console()) as display:
            for look in looks:
                display.show(look)


def events(
    run: RunArgument,
    following: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with those that come, until the run ends.")
    ] = False,
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only those of this kind; docs/rest.md lists them. Repeatable."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="How many past ones, the newest ones.")] = 100,
    output: FormatOption = Format.TABLE,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca: CaOption = None,
) -> None:
    """Tell what happened in a run, oldest first: time, kind, and a sentence.

    With --follow a restart of the coordinator is waited for, and JSON is a line for each event.

    \b
    Example:
      outerstep run events my-run --kind late --kind lost
      outerstep run events my-run --follow --limit 10
    """

    def wanted(events: Iterable[Event], newest: int | None) -> list[Event]:
        return list(deque((each for each in events if not kinds or each.kind in kinds), maxlen=newest))

    def say_if_never(events: Iterable[Event]) -> None:
        """A kind that was mistyped would look like nothing having happened."""
        there = sorted({each.kind for each in events})
        for kind in kinds or []:
            if kind not in there:
                say(f"outerstep: no event of the kind {kind} so far; there are: {', '.join(there)}", err=True)

    with operator_client(url, token, token_file, ca) as client:
        if not following:
            all_events = list(client.events(run))
            past = wanted(all_events, limit)
            say_if_never(all_events)
            if output is Format.JSON:
                print_json(past)
            else:
                _say_events(past)
            return
        newest: int | None = limit  # of the first look, which has all that has happened
        for look in follow(client, run, patience_s=EVENTS_PATIENCE_S, sleep=time.sleep):
            if output is Format.JSON:
                for event in wanted(look.events, newest):
                    print_json_line(event)
            else:
                _say_events(wanted(look.events, newest))
            if newest is not None:
                say_if_never(look.events)
            newest = None
            if look.trouble:
                say(f"outerstep: {look.trouble}; asking again", err=True)


def _say_events(events: Iterable[Event]) -> None:
    for event in events:
        say(f"{time_text(event.at)}  {event.kind:<{KIND_WIDTH}}  {event.message}")
