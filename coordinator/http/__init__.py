"""What HTTP asks of every route: problems, limits, authentication, access, long polls, HEAD, headers, OpenAPI."""
