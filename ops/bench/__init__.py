"""Measurements of whole steps: random-weight models through the scheduler and real worker processes."""
