"""Boxes of very different speeds in one run: what their work is worth, by how it is merged.

    python -m benchmarks.unequal [--only NAME …] [--seeds 1] [--rounds 40] [--absences | --product] [--json]

Eight workers take 1, 1, 1, 1, 0.5, 0.25, 0.1 and 0.02 inner steps in the time of one step of the fastest. All rows but
two last equally long, and as the workers never idle, they take equally many tokens. The baselines:

  equal speeds         (a) eight workers of 0.61 each, which is as many steps in total
  without the slowest  (b) the first five workers alone: fewer tokens
  synchronous          (c) one batch of eight workers per step, as many tokens as (a); it would take 50 times as long,
                       because each step waits for the slowest

The loop (loop.py) is plain torch, in virtual time. With --absences, it has four equal boxes instead, and a coordinator
that is away for the time of some rounds every 20 rounds. Meanwhile the boxes train on, for at most as many times H
inner steps as the row says, and then wait. With --product, real workers train with a real coordinator (product.py).
"""
