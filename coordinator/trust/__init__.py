"""How far the coordinator trusts what workers send and report.

verdicts.py    how much each contribution counts: its weight, and the verdict by what was measured in it
quarantine.py  reputations: a worker that is left out repeatedly takes no part for a while
equal_work.py  reports workers that send the same contribution
evaluating.py  which workers measure the held-out loss, and whose measurement is accepted
held_out.py    the held-out loss of a state
leaving_out.py which contributions have raised that loss
guard.py       what happens if the model looks spoilt nevertheless

`aggregation/measuring.py` and `judging.py` are the pure part below: they measure contributions and judge them.
`sync/admission.py` rejects those that claim more work than was assigned; `run/step_rates.py` limits the speed that a
worker may report.
"""
