"""Notifications of events and alerts. notification.py says what becomes one, webhook.py sends it as signed JSON,
services.py by Apprise; sending.py has the threads that do so."""
