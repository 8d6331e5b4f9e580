"""What tests, benchmarks and docs set up around the packages.

coordinator.py      a real coordinator, in a thread or in a process; certificates for it
member.py           a worker without a model, by the numpy reference alone
stores.py           blob stores of tests: in memory, disturbed, blocked
lines.py            simulated network lines: bandwidth, latency, loss
remote.py           processes behind such lines; remote_process.py is their side
clients.py          clients for crowds: raw HTTP, and dashboard viewers
browser.py          Chromium
"""
