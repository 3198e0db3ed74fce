"""The secret of a job: how long it must be, and who may read its file."""

from pathlib import Path
from typing import Final

from meshmend.errors import InputError

SHORTEST_BYTES: Final = 16
HOW_TO_MAKE: Final = 'make one with: python -c "import secrets; print(secrets.token_hex(32))"'
_OTHERS: Final = 0o077  # the permissions of the group and of everybody else


def check_secret(secret: str, where: str) -> None:
    """Refuse a secret that is so short that it can be guessed; `where` names where it is set.

    Raises:
        InputError: it has fewer than 16 bytes.
    """
    n_bytes = len(secret.encode(errors="replace"))
    if n_bytes < SHORTEST_BYTES:
        raise InputError(
            f"{where} needs a secret of at least {SHORTEST_BYTES} bytes, but got one of {n_bytes}; "
            f"{HOW_TO_MAKE}"
        )


def secret_in(file: Path) -> str:
    """Return the secret that a file holds, without the blanks around it.

    Raises:
        InputError: the file cannot be read, others can read it, or the secret is too short.
    """
    try:
        mode = file.stat().st_mode & 0o777
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--secret-file cannot read {file}: {error}") from None
    if mode & _OTHERS:
        raise InputError(
            f"--secret-file needs a file that only its owner can use, but {file} has mode "
            f"{mode:03o}; run: chmod 600 {file}"
        )
    if not secret:
        raise InputError(f"--secret-file needs a secret, but {file} is empty; {HOW_TO_MAKE}")
    check_secret(secret, f"--secret-file {file}")
    return secret
