"""The worker trains the model with the inner optimizer and does its side of the sync. Uses torch and httpx.

In reading order:

    train.py        the training loop of `outerstep worker`: H inner steps per round
    diloco.py       the class DiLoCo, for any training loop
    rounds/         the algorithm; its docstring is the theory of operation
    state/          what a worker holds: fragments of the model, the outer state, work in no mean yet, the snapshot
    link/           the REST client, membership, the lease, the worker token
    line/           bytes to and from the coordinator: connections, rate limits, retries, resumable transfers
    joining/        how a worker gets the run's state: seeding, checkpoints, recovery
    codecs/         the codecs in torch
    tuning/         what only makes things faster: zstd where it pays off, a side stream on a GPU
    accounts/       measurements: seconds, bytes, losses, speed, device use
    script/         what a script passes in: optimizers, schedulers, its DataLoader; hooks and checks
    data/           the training set as work units
    models/         the model of a run
    inner/          one inner step: loss, micro-batches, precision, optimizers, schedules; evaluation

    box.py          the run's data, model and inner steps with this machine's settings (settings.py)
    allowing.py     what a run spec may do on this machine
    ranks.py        several processes as one worker
    agent.py        the `outerstep worker` process; starting.py its device, process.py its log and signals
    export.py       a checkpoint as a Hugging Face directory
    errors.py       the tree of exceptions
"""
