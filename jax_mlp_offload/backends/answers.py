"""What a store's answer means: whether to try again, and what to tell the user.

TensorStore raises one exception type whose text holds everything: a status word, its own account, what the server said,
and in brackets the HTTP code, the whole response and the whole spec. Here alone that text is taken apart. What always
holds: no text that leaves here holds a credential.

Pure; any thread.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import http
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from jax_mlp_offload.tiers import Tier

_LONGEST_TEXT = 300
_SHORTEST_SECRET = 4  # shorter values would take common words out of messages


class Verdict(enum.Enum):
    """What to do about a request that failed."""

    AGAIN = "again"  # the store is busy, or the connection was lost
    NO_ANSWER = "no answer"  # within the time for one request
    REFUSED = "refused"  # the credentials
    ABSENT = "absent"  # bucket, folder or object
    WRONG = "wrong"  # what came back is not what was written
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Why a request failed, in one line, and as an errno (0: what came back is wrong or missing)."""

    verdict: Verdict
    error_number: int
    text: str


class RequestError(Exception):
    """A request failed for good."""

    def __init__(self, answer: Answer, what: str) -> None:
        super().__init__(f"{what}: {answer.text}")
        self.answer = answer


_HTTP = re.compile(r"http_response_code='(\d{3})'")
_OS = re.compile(r"\[(?:OS error |os_error_code=')(\d+)")
_RULES: tuple[tuple[re.Pattern[str], Verdict, int], ...] = (
    # S3 says 400 where a token has expired, so its own words come before the code
    (
        re.compile(
            r"\b(ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied"
            r"|RequestTimeTooSkewed)\b"
        ),
        Verdict.REFUSED,
        errno.EACCES,
    ),
    (re.compile(r"http_response_code='40[13]'|^(PERMISSION_DENIED|UNAUTHENTICATED)\b"), Verdict.REFUSED, errno.EACCES),
    (re.compile(r"http_response_code='(408|429|5\d\d)'|\bRequestTimeout\b"), Verdict.AGAIN, errno.EIO),
    (re.compile(r"curl_code='\d+'"), Verdict.AGAIN, errno.EIO),
    (re.compile(r"^chunk .* is missing|^NOT_FOUND: chunk .* is missing"), Verdict.WRONG, 0),
    (re.compile(r"http_response_code='404'|^NOT_FOUND\b"), Verdict.ABSENT, errno.ENOENT),
    (re.compile(r"http_response_code='\d+'"), Verdict.FAILED, errno.EIO),
    (re.compile(r"^(ABORTED|UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED)\b"), Verdict.AGAIN, errno.EIO),
    (re.compile(r"^(DATA_LOSS|FAILED_PRECONDITION|OUT_OF_RANGE|INVALID_ARGUMENT)\b"), Verdict.WRONG, 0),
)
"""The first pattern that is found in the text decides."""

_SAYS = {
    Verdict.REFUSED: "the credentials were refused: {}; renew those in the environment, the profile or the role",
    Verdict.WRONG: "the object is not what was written: {}",
}


def classify(error: BaseException, scrub: Callable[[str], str]) -> Answer:
    """What an exception of TensorStore means.

    Args:
      error: the exception.
      scrub: see :func:`scrubber`.
    """
    text = str(error)
    verdict, error_number = Verdict.FAILED, errno.EIO
    if system := _OS.search(text):
        error_number = int(system[1])
    else:
        found = ((verdict, number) for pattern, verdict, number in _RULES if pattern.search(text))
        verdict, error_number = next(found, (verdict, error_number))
    return Answer(verdict, error_number, _SAYS.get(verdict, "{}").format(_in_one_line(scrub(text))))


def _in_one_line(text: str) -> str:
    """TensorStore's account without its status word, its spec and the response.

    It is cut, so it must be scrubbed before: half of a secret would not be known for one.
    """
    code, system = _HTTP.search(text), _OS.search(text)
    head = re.split(r"\s*\[(?:[\w.-]+=|OS error)", text, maxsplit=1)[0]
    head = re.sub(r"^[A-Z]+(_[A-Z]+)*: ", "", head.strip())
    head = re.sub(r"^Error (reading|writing|opening) .*?: ", "", head)
    head = re.sub(r"All \d+ retry attempts failed: ", "", head)
    head = re.sub(r"\s+", " ", head).strip(" :")
    if code:
        name = http.HTTPStatus(int(code[1])).phrase if int(code[1]) in list(http.HTTPStatus) else "Unknown"
        head = f"{name if head in ('', 'Unknown') else head} (HTTP {code[1]})"
    if system:
        head = os.strerror(int(system[1]))
    return head[:_LONGEST_TEXT] or "no reason given"


# -- secrets

_PATTERNS = (
    (re.compile(r"(\w+://)[^/@\s\"']*@"), r"\1"),  # user and password of a URL
    (re.compile(r"(?i)\b(X-Amz-(?:Signature|Credential|Security-Token)|access_token|sig)=[^&\s\"']+"), r"\1=***"),
    (re.compile(r"(?i)\b(bearer)\s+[\w.~+/=-]+"), r"\1 ***"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "***"),
    (re.compile(r"\bya29\.[\w.-]+"), "***"),
)
_SECRET_NAMES = re.compile(
    r"^AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|CONTAINER_AUTHORIZATION_TOKEN)$|^GOOGLE_\w*TOKEN|^GCE_\w*TOKEN"
)
_NO_SECRETS = ("type",)  # what kind of credentials they are: words that messages need
_SECRET_KEYS = re.compile(r"(?i)secret|token|password|credential|authorization|access_key")


def scrubber(tier: Tier) -> Callable[[str], str]:
    """A function that takes every secret out of a text.

    Those of the environment (read when it runs), those of the tier's URL or spec, and whatever looks like one.
    """
    given = _secrets_of(getattr(tier, "kvstore", ""))

    def scrub(text: str) -> str:
        secrets = [value for name, value in os.environ.items() if _SECRET_NAMES.match(name)]
        for secret in sorted((*secrets, *given), key=len, reverse=True):  # one may contain another
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "***").replace(urllib.parse.quote(secret, safe=""), "***")
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text

    return scrub


def _secrets_of(given: Any, key: str = "") -> list[str]:
    """Those of a URL or spec; ``key``: the names on the way there, as in ``credentials.key``."""
    if isinstance(given, Mapping):
        below = ((value, f"{key}.{name}") for name, value in given.items() if name not in _NO_SECRETS)
        return [secret for value, joined in below for secret in _secrets_of(value, joined)]
    if isinstance(given, (list, tuple)):
        return [secret for value in given for secret in _secrets_of(value, key)]
    if not isinstance(given, str):
        return []
    if "://" not in given:
        return [given] if _SECRET_KEYS.search(key) else []
    url = urllib.parse.urlsplit(given)
    user, _, password = url.netloc.rpartition("@")[0].partition(":")
    queried = [value for _, value in urllib.parse.parse_qsl(url.query)]
    return [urllib.parse.unquote(secret) for secret in (user, password, *queried) if secret]
