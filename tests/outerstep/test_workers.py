"""Listing a run's workers and showing one of them, on a real coordinator."""

import json
import re

import httpx
import pytest

from harness.member import Member, spec_toml
from tests.outerstep.conftest import Served

pytestmark = pytest.mark.slow

HOST = {"device": "cuda:0: Some GPU", "threads": 8}


def member(served: Served, run: str, name: str) -> Member:
    http = httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.admin_token}"})
    return Member(http, run, name)


def test_workers_are_listed_and_each_is_shown_in_full(served: Served):
    assert served.outerstep("run", "create", "-", stdin=spec_toml("staffed", min_workers=1))[0] == 0
    told = member(served, "staffed", "box-2")
    told.ask_to_join(host=HOST).raise_for_status()
    told.http.delete(told.path()).raise_for_status()
    worker = member(served, "staffed", "box-1")
    worker.join(served.admin_token)
    assert worker.assignment(None).action == "seed"
    worker.seed()
    assignment = worker.take_part(0)
    worker.step(0)
    report = {"round": 0, "epoch": worker.joined.epoch, "upload_bytes": 5000, "download_bytes": 7000}
    asked = {"state_round": 1, "report": report | {"seconds": {"train": 75.0, "sync": 25.0}}}
    worker.http.put(worker.path("/assignment"), json=asked).raise_for_status()
    metrics = {"round": 1, "inner_step": 3, "phase": "train", "tokens_per_second": 4321.0, "upload_bytes": 6000}
    worker.http.put(worker.path("/lease"), json=metrics).raise_for_status()

    code, table, _ = served.outerstep("run", "show", "staffed", "--workers")
    header, first, second = table.splitlines()
    assert (code, header.split()) == (
        0,
        ["worker", "state", "device", "tokens", "tokens/s", "up", "down", "score", "quarantine", "seen"],
    )
    assert re.search(r"^box-1 +live +– +\d+ +4\.32 k +6 kB +0 B +1\.00 +– +\d+\.\d s ago$", first), first
    assert re.search(r"^box-2 +left +cuda:0: Some GPU +0 +– +0 B +0 B +1\.00 +– +–$", second.rstrip()), second
    listed = json.loads(served.outerstep("run", "show", "staffed", "--workers", "--format", "json")[1])
    assert [each["name"] for each in listed] == ["box-1", "box-2"]

    code, facts, _ = served.outerstep("run", "show", "staffed", "--worker", "box-1")
    assert code == 0
    for fact in (
        r"^state +live *$",
        r"^doing +train *$",
        r"^round +1, inner step 3 *$",
        r"^moved +5 kB up, 7 kB down *$",
        r"^time +1 min 40 s: train 75%, sync 25% *$",
        r"^score +1\.00 *$",
        r"^ +0 +2 of 2 +1\.00 +– +– +1 min 40 s",
    ):
        assert re.search(fact, facts, re.MULTILINE), f"{fact}\n{facts}"
    document = json.loads(served.outerstep("run", "show", "staffed", "--worker", "box-1", "--format", "json")[1])
    taken = next(each for each in document["rounds"] if each["round"] == 0)
    assert (document["worker"]["name"], assignment.round) == ("box-1", 0)
    assert {fragment: verdict["factor"] for fragment, verdict in taken["verdicts"].items()} == {"0": 1.0, "1": 1.0}
    assert (taken["late"], taken["account"]["upload_bytes"]) == ({}, 5000)

    facts = served.outerstep("run", "show", "staffed", "--worker", "box-2")[1]
    assert re.search(r"^its device +cuda:0: Some GPU *$", facts, re.MULTILINE)
    assert "fragments" not in facts, "it took part in no round"
    code, out, err = served.outerstep("run", "show", "staffed", "--worker", "ghost")
    assert (code, out, err.startswith("outerstep: not-found: ")) == (3, "", True)
