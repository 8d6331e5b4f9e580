"""The algorithm: DiLoCo's rounds on one worker. This page is the theory of operation; the loop is in rounds.py.

The algorithm
=============

DiLoCo (arXiv 2311.08105, algorithm 1) trains replicas that communicate once every H inner steps. Round r on worker w:

    θ_local = θ_global                                   all workers start from the same point
    H times: θ_local = inner_optimizer(θ_local, batch)
    Δ_w = θ_global − θ_local                             the pseudo-gradient; the outer optimizer descends
    Δ = weighted mean of all Δ_w                         on the coordinator; published as the delta
    θ_global, u = outer_step(θ_global, u, Δ)             SGD with Nesterov momentum u: the same bits on all machines

Streaming DiLoCo (arXiv 2501.18512, algorithm 2) cuts the model into fragments that are synchronised at different times,
while the training goes on; eager updates (arXiv 2502.12996) let a fragment travel for a whole round. One loop does all
of these. Each fragment is *sent* after one inner step and *merged* after another, by a schedule (schedule.py); classic
DiLoCo sends and merges everything after step H.

    sent      Δ_w = θ_global − θ_local
    merged    θ_local = θ_global(new) − carry

`carry` (state/work.py) is progress that this worker has made and that is in no mean yet: what was trained while the
fragment travelled (`ahead`), what the codec left out (`unsent`, error feedback), and what the mean lacks of a
contribution that came too late (`late`). Training starts from θ_global − carry, so the carry is a part of the next
pseudo-gradient: no progress is lost, and none counts twice. θ_global never steps on a worker's own un-averaged
pseudo-gradient; the outer step takes published deltas only.

With `sync.wait = "never"`, everything is sent after step H, and the training goes on until the deltas are there. To
start these steps near the new θ_global, the model first takes the outer step of its own pseudo-gradient alone:

    sent      θ_local = alone = θ_global − η·(μ²·u + (1 + μ)·Δ_w)
    merged    θ_local = θ_global(new) − carry,   where ahead = alone − θ_local

If other rounds have closed meanwhile, `ahead` is dropped: it would set the others back.

A round on a worker
===================

1. Ask (assignments.py). The assignment names the round, H, and the work units; or it says wait, recover, seed, finish.
2. Load θ_global − carry into the model; measure the held-out loss if asked to.
3. Inner steps. After each one, send the fragments that are due (round.py): gather the parameters, make the
   contribution, encode and upload it (exchange.py).
4. In flight (in_flight.py), each fragment by itself: the coordinator averages it, its delta is downloaded, and the
   outer step is taken on this worker's θ_global.
5. Merge the fragments that are due; wait for their deltas if they have not come (stage `sync`).
6. Settle: report the round, and compute the carry and the units that no accepted contribution has consumed.

A contribution names the units that it contains: those of its round trained on so far, and those of the last round that
came after its last contribution. The coordinator consumes each unit once.

Threads
=======

    training loop           everything that reads or writes the model: inner steps, gather, merge, snapshots of the
                            optimizers
    fragment (1 for each)   make the contribution, in order; upload it, 3 at once; take the outer step
    download (8)            wait for a delta and download it
    snapshot (1)            take the outer state's digests and write the snapshot
    heartbeat (1)           renew the lease; tell the training loop that the run wants this worker to stop

Fragments step different parts of the outer state at once. The snapshot thread reads all of it,
and nothing changes it meanwhile. If one fragment fails, the others are abandoned, and the training loop decides:
`Resync`, `WorkLost` and `Unwanted` drop the round's work, `RunEnded` and `Stopped` end the training.

Several processes (ranks.py) run this loop in lockstep. Each owns some of the fragments: it holds their outer state, and
uploads and downloads them; all send and merge every fragment, in the same order.

What is durable when
====================

    outer state   as the training of a round starts. In memory: written then, two files take turns. In files: flushed;
                  each outer step has gone into another file than the state before
    work          classic: all contributions and the optimizers' states, after step H, before the last upload starts. So
                  a round never closes with work in it that only this process knows.
    round start   with overlap or spread fragments, in place of the work: local parameters, carry and optimizers' states
                  as the round starts, before any of its uploads
    contribution  on the coordinator, when its upload returns; uploads are idempotent

What a crash costs (with a state directory; without one, the worker restarts as a new one):

    during inner steps                 the inner steps of this round: it resumes the last sync (accepted as the same,
                                       deltas are published), comes to the same start, and trains on the same units
    after step H, work not durable     the same: all H inner steps
    uploading, waiting, stepping       nothing: it resumes the sync from the saved work
    with overlap, at any time          the inner steps of this round, from the saved round start; without waiting,
                                       those beyond H as well
    before the first snapshot          the inner steps, and the optimizers' states: state 0 or a checkpoint is loaded

If the run has moved on meanwhile, the worker recovers the newest state, and its saved work goes into the next round as
late work if the coordinator still accepts its units.
"""
