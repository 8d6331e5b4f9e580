"""How far a worker is believed: its weight in the mean, quarantine, who measures the held-out loss, and the guard."""
