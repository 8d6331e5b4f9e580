"""Notifications of events and of alerts, which are what is wrong now (alerts.py). notification.py says what becomes a
notification, webhook.py sends it as signed JSON, services.py by Apprise; sending.py has the threads that do so."""
