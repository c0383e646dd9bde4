"""Command line, converters and tools around the engine."""
