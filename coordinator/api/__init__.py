"""The REST interface: a file per group of addresses in docs/rest.md. A route says who may call it and how large its
body may be."""
