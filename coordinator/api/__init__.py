"""The REST interface: each file one group of addresses of docs/rest.md. A handler gathers, decides and answers."""
