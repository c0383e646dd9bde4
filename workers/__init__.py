"""Worker processes: what the machine offers, who computes where, shared segments, supervision."""
