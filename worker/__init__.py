"""The worker: trains the model with the inner optimizer and owns its side of the sync. torch and httpx; no web server.

diloco.py    the class DiLoCo, for any training loop    rounds/      the algorithm: DiLoCo's rounds
train.py     the plain training loop                    state/       fragments, outer state, work, snapshots
agent.py     the `outerstep worker` process             link/        the way to the coordinator, and to the run's state
export.py    a checkpoint as a Hugging Face directory   codecs/      the codecs in torch
data.py      the training set                           tuning/      what only makes things faster
models.py    the model                                  accounts/    seconds, bytes and losses
"""
