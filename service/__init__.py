"""The gRPC front end: requests in, tokens out. Scheduling, text and bookkeeping are pure; I/O lives in engine, inference and server."""
