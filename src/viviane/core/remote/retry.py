"""Retries of failed requests with exponential backoff; the final error names the URL and the number of attempts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final, TypeVar

from viviane.core.errors import ConfigError, RemoteError, VivianeError
from viviane.core.logging import get_logger

ATTEMPTS_VARIABLE: Final = "VIVIANE_REMOTE_ATTEMPTS"
TIMEOUT_VARIABLE: Final = "VIVIANE_REMOTE_TIMEOUT_S"
_SECRETS: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 10.0
_LONGEST_TEXT: Final = 400
# Errors that are not retried: the store responded and refused.
_REFUSED: Final = re.compile(
    r"ACCESS.?DENIED|INVALID.?ACCESS.?KEY|INVALID.?CLIENT.?TOKEN|SIGNATURE.?DOES.?NOT.?MATCH|NO.?SUCH.?BUCKET"
    r"|EXPIRED.?TOKEN|UNRECOGNIZED.?CLIENT|HTTP status (400|401|403)|Permission denied|PERMISSION_DENIED"
    r"|AccessControlException|UNAUTHENTICATED",
    re.IGNORECASE,
)
_log = get_logger("remote")
T = TypeVar("T")


def attempts() -> int:
    """Return the maximum number of attempts per request: VIVIANE_REMOTE_ATTEMPTS, by default 5."""
    return int(bounded_number(ATTEMPTS_VARIABLE, 5, least=1))


def timeout_s() -> float:
    """Return the timeout of a request in seconds: VIVIANE_REMOTE_TIMEOUT_S, by default 20."""
    return bounded_number(TIMEOUT_VARIABLE, 20, least=1)


def bounded_number(name: str, default: float, least: float) -> float:
    """Return the number in an environment variable, or a default if it is not set.

    Raises:
        ConfigError: it is not a number, or too small.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = least - 1
    if not value >= least:
        raise ConfigError("an environment variable is not a number in the allowed range", where=name, value=text,
                          allowed=f"{least:g} or more")  # fmt: skip
    return value


def retried(request: Callable[[], T], url: str, purpose: str) -> T:
    """Return the result of a request, retried with exponential backoff while the store does not respond.

    Args:
        request: called again from the start for each attempt.
        url: URL for the message.
        purpose: description of the request, such as "reading".

    Raises:
        RemoteError: all attempts failed, or the store refuses; names the URL and the number of attempts.
        FileNotFoundError: the URL does not exist.

    Example:
        >>> retried(lambda: 3, "s3://bucket/key", "reading")
        3
    """
    from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

    def log_attempt(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        wait = state.next_action.sleep if state.next_action is not None else 0.0
        _log.warning("%s %s failed (attempt %d of %d), retry in %.1f s: %s", purpose, url, state.attempt_number, most,
                     wait, _text_of(error))  # fmt: skip

    most = attempts()
    retrying = Retrying(
        stop=stop_after_attempt(most),
        wait=wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
        retry=retry_if_exception(_is_transient),
        before_sleep=log_attempt,
        reraise=True,
    )
    try:
        return retrying(request)
    except (FileNotFoundError, VivianeError):  # final errors, which no failure of the store caused
        raise
    except (OSError, ValueError, RuntimeError) as error:
        count, refused = retrying.statistics["attempt_number"], _is_refused(error)
        raise _failed(url, purpose, _text_of(error), count, refused) from None  # the cause may contain a secret


def _is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed."""
    is_failure = isinstance(error, OSError | ValueError | RuntimeError)
    return is_failure and not isinstance(error, FileNotFoundError | VivianeError) and not _is_refused(error)


def _is_refused(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or _REFUSED.search(_text_of(error)) is not None


def _text_of(error: BaseException | None) -> str:
    return without_secrets(str(error)) or type(error).__name__


def _failed(url: str, purpose: str, text: str, count: int, refused: bool) -> RemoteError:
    if refused:
        return RemoteError(
            f"the store refuses {purpose}",
            where=url,
            value=text,
            fix="set credentials with sufficient permissions in the environment, and check the bucket name",
        )
    return RemoteError(
        f"{purpose} failed {count} times; the store does not respond correctly",
        where=url,
        value=text,
        fix=f"check the store and the network, then retry; {ATTEMPTS_VARIABLE} and {TIMEOUT_VARIABLE} set the patience",
    )


def without_secrets(text: str) -> str:
    """Return a message on one line of limited length, with the credentials of the environment masked."""
    for name in _SECRETS:
        value = os.environ.get(name, "")
        if len(value) > 3:
            text = text.replace(value, f"<{name}>")
    short = " ".join(text.split())
    return short if len(short) <= _LONGEST_TEXT else f"{short[:_LONGEST_TEXT]} ..."  # Java sends stack traces
