"""Work on the bytes of one fragment: the mean of its contributions, and its outer state. The leader does it, or
aggregators do.

    tasks.py       what must be known to do it, and what comes out of it
    fragment.py    contributions in, a judged and averaged delta out
    measuring.py   one contribution while it is checked: its norm, and a sketch to compare its direction with others
    judging.py     all contributions to a closed fragment: which are left out, which are shortened, and why. Pure
    mean.py        the arithmetic of the average
    state_file.py  an outer state in a file, and the outer step
    queue.py       the table of tasks: leases, fencing tokens, results
    delegation.py  the leader's side: it adds tasks, and waits for results
    aggregator.py  an aggregator's side, and its process
    states.py      the outer states that an aggregator keeps
"""
