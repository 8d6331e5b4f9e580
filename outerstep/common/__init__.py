"""What both sides use and the protocol does not define: addresses, HTTP responses, files, text, tracing, exit codes."""
