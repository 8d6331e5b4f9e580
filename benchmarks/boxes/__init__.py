"""What a second box gives: the time to the held-out loss that the faster box reaches alone, as a share of its own time.

    python -m benchmarks.boxes floor [--boxes 1,1 1,1/2 …] [--seeds 1] [--delay 0.5]
    python -m benchmarks.boxes real  [--boxes …] [--line NAME …] [--sync NAME …] [--seeds 1]
    python -m benchmarks.boxes trouble [NAME …] [--sync NAME …]
    each: [--quick] [--results FILE] [--json]; floor and real: [--model tiny|1.5M] [--rounds 60] [--momentum 0.6]

A box is written as its speed: 1 for the fastest, 1/2 for one that takes half as many inner steps per second. *Alone* is
a plain training loop on the fastest box, with the same model, data, inner optimizer and schedule, but no outer
optimizer: what its owner would run without Outerstep.

A run's learning rate falls over its whole length, so a loss after half of a run says nothing about a run of half that
length. Therefore each row trains runs of several lengths to their ends, and the length with the loss of *alone* is
interpolated between two of them.

  floor    a loop in virtual time (loop.py), in which a sync takes no time, or --delay of a round: what the algorithm
           gives
  real     a real coordinator, and workers in processes that are slowed down to their speeds (real.py), behind lines
  trouble  the second of two boxes fails in the middle of a run, or the coordinator does: the time per round from then
           on, as a share of the healthy box's own, and the longest round
"""
