"""The page for people, at `/`: plain files (page/) and the library of its charts, and how they are served.

It is a client of the REST interface like any other: it holds nothing, and without a token it shows nothing.
"""
