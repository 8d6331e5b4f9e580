"""The parts of HTTP that all routes share, in the order in which a request passes through them:

connection_limit.py, connections.py   how many connections, and how long each may take: uvicorn's protocol with limits
middleware.py                         HEAD, request ids, headers, protocol version, authentication, rate limits
access.py                             who may call a route, and the parameters that routes share
bodies.py                             JSON messages: size, rate, parsing
uploads.py, downloads.py              payloads: Content-Digest, parts; ETag, Range
long_polls.py                         `Prefer: wait=SECONDS`
response_cache.py                     JSON responses from the database, shared by clients that accept an older one
problems.py                           every error as problem+json
openapi.py                            the schema and its pages
"""
