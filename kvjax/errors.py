"""What can go wrong, in two classes; everything else is Python's own."""


class GeometryError(ValueError):
    """Sizes, shapes, dtypes or layers that do not fit together."""


class UnsupportedError(NotImplementedError):
    """What was asked for cannot run here; the message says why, and what can."""
