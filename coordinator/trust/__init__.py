"""How far a worker is believed.

verdicts.py    how much each contribution counts: its weight, and the verdict by what was measured in it
quarantine.py  reputations: a worker that was left out again and again takes no part for a while
equal_work.py  reports of workers that send the same
evaluating.py  which workers measure the held-out loss, and whose measurement is believed
held_out.py    the held-out loss of a state
guard.py       what happens if the model looks spoilt anyway

`screening/` is the pure part below: it measures contributions and judges them. `sync/admission.py` refuses those that
claim more work than was assigned; `run/step_rates.py` bounds the speed that a worker reports.
"""
