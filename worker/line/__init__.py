"""The network line to the coordinator: connections, rate limits, measured throughput, transfers and retries."""
