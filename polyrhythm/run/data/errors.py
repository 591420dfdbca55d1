"""What a dataset may do wrong."""

from polyrhythm.errors import UserError


class DataError(UserError):
    """A dataset that cannot be dealt out, or a sample of it that cannot be loaded."""
