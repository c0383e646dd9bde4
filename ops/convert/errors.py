"""The one error of the converters."""

from __future__ import annotations


class ConvertError(ValueError):
    """A source cannot be converted. The message names the file and the tensor or setting, and says what would help."""
