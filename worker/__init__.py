"""The worker: trains the model with the inner optimizer and owns its side of the sync. torch and httpx; no web server.

agent.py      the `outerstep worker` process      diloco.py    the class DiLoCo, for any training loop
train.py      the plain training loop             rounds.py    from one round to the next: collect, sync, ask, begin
recovery.py   how it comes to the run's state     sync.py      one round's uploads, downloads, outer steps
grace.py      how long it may go on when asked to stop
"""
