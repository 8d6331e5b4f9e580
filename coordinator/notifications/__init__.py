"""Notifications: what an operator should know, sent to a webhook."""
