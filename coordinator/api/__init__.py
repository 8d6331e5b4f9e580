"""The REST interface, in the application of app.py: one file per group of paths in docs/rest.md. Each route declares
who may call it and how large a body it accepts."""
