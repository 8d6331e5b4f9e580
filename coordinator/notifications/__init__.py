"""Notifications to a webhook. alerts.py finds conditions that begin and end, outbox.py keeps the notifications to send,
formats.py builds each receiver's request body, sending.py delivers it."""
