"""Errors of datasets."""

from polyrhythm.errors import UserError


class DataError(UserError):
    """A dataset that cannot be used, or a sample that cannot be loaded."""
