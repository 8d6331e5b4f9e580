"""The dashboard at `/`: its static files (page/) and how they are served (serving.py).

It is a client of the REST interface like any other. It stores nothing, and shows nothing without a token.
"""
