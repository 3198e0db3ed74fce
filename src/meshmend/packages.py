"""Packages that only a part of meshmend needs: are they installed, and new enough?

What each extra needs, and since which version, is written in `pyproject.toml` alone; an installed
meshmend carries it as metadata. A folder of sources that was never installed has no metadata, so
versions are not checked there.
"""

from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from meshmend.errors import MissingPackageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def need(who: str, *packages: str, extra: str, otherwise: str = "") -> None:
    """Raise MissingPackageError unless packages can be imported and are new enough.

    `extra` installs them, or several by commas; `otherwise` says what else can be done.
    """
    install = f"run: pip install 'meshmend[{extra}]'{otherwise}"
    for package in packages:
        if find_spec(package) is None:
            raise MissingPackageError(f"{who} needs {package}, but it is not installed; {install}")
    for each in (each for name in extra.split(",") for each in packages_of(name)):
        if each.name not in packages:
            continue
        try:
            found = version(each.name)
        except PackageNotFoundError:  # it can be imported, but nobody knows its version
            continue
        if is_older(found, each):
            raise MissingPackageError(
                f"{who} needs {each.name} {oldest_of(each)} or newer, but {found} is installed; "
                f"{install}"
            )


def packages_of(extra: str) -> "list[Requirement]":
    """Return what an extra installs; nothing, if meshmend itself is not installed."""
    from packaging.requirements import Requirement  # the command line starts without it

    try:
        needed = map(Requirement, requires("meshmend") or ())
    except PackageNotFoundError:
        return []
    return [each for each in needed if each.marker and each.marker.evaluate({"extra": extra})]


def is_older(found: str, package: "Requirement") -> bool:
    """Whether a version is older than the oldest one that is asked for."""
    from packaging.version import Version

    # A build from sources, such as 2.15.0a0+git, has what its release has.
    return Version(Version(found).base_version) < Version(oldest_of(package))


def oldest_of(package: "Requirement") -> str:
    """Return the oldest version of a package that is asked for."""
    return next(each.version for each in package.specifier if each.operator == ">=")
