"""Notifications to a webhook: alerts.py finds what begins and ends, outbox.py keeps what must be sent, sending.py
delivers it, formats.py has the request's body for each receiver.
"""
