"""Processes that are forked from one which has imported the product, and has done nothing else: there is one for all
tests, so all say here what it imports."""

import multiprocessing

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(
    [
        "tests.support.crashing",
        "pytest",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "lightning.pytorch",
        "transformers.trainer",
    ]
)
