"""The REST interface: a file per group of addresses in docs/rest.md. A handler gathers, decides and answers."""
