"""The versions of other libraries that the integrations support."""

from __future__ import annotations

from importlib import metadata

SUPPORTED = {
    "accelerate": ("1.15", "1.16"),
    "lightning": ("2.6", "2.7"),
    "transformers": ("5.20", "5.24"),
    "trl": ("1.16", "1.17"),
}
"""By library, the oldest supported version and the first one that is not."""


def check_version(library: str) -> None:
    """Check that a supported version of a library is installed.

    Raises:
        ImportError: it is not installed, or has another version; says what to install.
    """
    oldest, end = SUPPORTED[library]
    wanted = f"install '{library}>={oldest},<{end}'"
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        raise ImportError(f"poplar.integrations.{library} needs {library}; {wanted}") from None
    if not _numbers(oldest) <= _numbers(found) < _numbers(end):
        raise ImportError(
            f"poplar.integrations.{library} supports {library} from {oldest} to below {end}, but "
            f"{found} is installed; {wanted}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2])
