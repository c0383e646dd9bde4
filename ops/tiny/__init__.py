"""The trained tiny mixture of experts: how it was made, what it was measured to be, and the container itself."""
