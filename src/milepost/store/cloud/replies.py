"""What a failed request means, and what to tell the user.

obstore's errors hold whole replies and URLs, with signatures and tokens in some. Nothing of them is shown as it is: a
`Refusal` keeps the status, the service's code and its message, scrubbed.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto


class Why(Enum):
    """Why a request was not answered as it should be."""

    TAKEN = auto()  # create-if-absent found an object
    ABSENT = auto()  # no such object
    NO_BUCKET = auto()
    SHORT = auto()  # the range lies behind the end of the object
    DENIED = auto()  # the credentials are known, and may not do this
    NO_CREDENTIALS = auto()
    BAD_CREDENTIALS = auto()
    EXPIRED = auto()  # the credentials were good; new ones may be
    CLOCK = auto()
    REGION = auto()
    CONFLICT = auto()  # two requests for one name at once: ask again
    THROTTLED = auto()  # too many requests: ask again, more slowly
    BUSY = auto()  # an error inside the service, which may have acted
    DAMAGED = auto()  # the body that arrived is not the one that was sent, or was asked for
    UNREACHABLE = auto()  # no connection: nothing was sent
    UNTRUSTED = auto()  # the certificate is not signed by anyone that we trust
    LATE = auto()  # the reply did not come in time: the service may have acted
    UNANSWERED = auto()  # the connection was cut: the service may have acted
    REFUSED = auto()  # any other answer that asking again does not change


CURABLE = frozenset({Why.CONFLICT, Why.THROTTLED, Why.BUSY, Why.DAMAGED, Why.UNREACHABLE, Why.LATE, Why.UNANSWERED})
"""Asking again may help."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failed request: why, and the words to show (status, code and message of the service, or of the connection).

    `may_act`: the service may have done what was asked, or may still do it.
    """

    why: Why
    words: str
    code: str = ""
    may_act: bool = False


_STATUS = re.compile(r"status code: (\d{3})|error response:")
_XML_CODE = re.compile(r"<Code>([A-Za-z0-9_.]{1,80})</Code>")
_XML_MESSAGE = re.compile(r"<Message>([^<]{1,500})", re.DOTALL)
_JSON_MESSAGE = re.compile(r'"message":\s*"((?:[^"\\]|\\.){1,500})"')
_JSON_REASON = re.compile(r'"reason":\s*"([A-Za-z0-9_.]{1,80})"')
_DELETE_CODE = re.compile(r"failed for key .*: (.{0,300}) \(code: ([A-Za-z0-9_.]{1,80})\)")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_OS_TEXT = re.compile(r'message: "([^"\n]{1,200})"')
_METADATA = re.compile(
    r"performing \w+ https?://(?:169\.254\.\d+\.\d+|\[fd00:ec2::254\]|metadata\.google\.internal)[:/]"
)

_BY_CODE = {
    Why.TAKEN: "PreconditionFailed BlobAlreadyExists conditionNotMet",
    Why.NO_BUCKET: "NoSuchBucket ContainerNotFound InvalidBucketName ContainerBeingDeleted",
    Why.EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired InvalidToken",
    Why.BAD_CREDENTIALS: "InvalidAccessKeyId SignatureDoesNotMatch AuthenticationFailed InvalidAuthenticationInfo",
    Why.CLOCK: "RequestTimeTooSkewed",
    Why.REGION: "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException",
    Why.THROTTLED: "SlowDown ServerBusy TooManyRequests RequestLimitExceeded ThrottlingException Throttling",
    Why.BUSY: "InternalError OperationTimedOut RequestTimeout",
    Why.DAMAGED: "XAmzContentSHA256Mismatch BadDigest InvalidDigest Md5Mismatch IncompleteBody",
    Why.CONFLICT: "ConditionalRequestConflict OperationAborted",
    Why.ABSENT: "NoSuchKey BlobNotFound",
    Why.SHORT: "InvalidRange",
}
_CODES = {code: why for why, codes in _BY_CODE.items() for code in codes.split()}
_STATUSES = {
    301: Why.REGION, 307: Why.REGION, 401: Why.EXPIRED, 403: Why.DENIED, 404: Why.ABSENT, 408: Why.BUSY,
    409: Why.CONFLICT, 412: Why.TAKEN, 416: Why.SHORT, 429: Why.THROTTLED, 500: Why.BUSY, 501: Why.REFUSED,
    502: Why.BUSY, 503: Why.THROTTLED, 504: Why.BUSY,
}  # fmt: skip

_NONSENSE = Refusal(Why.DAMAGED, "the reply makes no sense", may_act=True)
_BY_TEXT = {
    "InvalidHeaderValue": Refusal(
        Why.REFUSED, "credentials, region or another setting hold a newline, or another character that no header takes"
    ),
    "without LOCATION": Refusal(Why.REGION, "the service redirects to another region"),
    "non-partial response": Refusal(Why.REFUSED, "the service ignores ranges"),
    "ot invalid ": _NONSENSE,
    "UnexpectedRange": _NONSENSE,
    "Content-Range": _NONSENSE,
}


def understand(text: str, secrets: Iterable[str] = ()) -> Refusal:
    """What an error of obstore means, from its text. No secret, URL or signature gets into the result."""
    if _METADATA.search(text):
        return Refusal(Why.NO_CREDENTIALS, "no credentials were found")
    if deleted := _DELETE_CODE.search(text):
        return _not_deleted(deleted[2], deleted[1], secrets)
    if status := _STATUS.search(text):
        code = _XML_CODE.search(text) or _JSON_REASON.search(text)
        message = _XML_MESSAGE.search(text) or _JSON_MESSAGE.search(text)
        return _answered(int(status[1] or 500), code[1] if code else "", message[1] if message else "", secrets)
    if kind := _KIND.search(text):
        return _not_connected(text) if kind[1] == "Connect" else _not_answered(kind[1], text)
    for sign, refusal in _BY_TEXT.items():
        if sign in text:
            return refusal
    return Refusal(Why.REFUSED, scrub(text.partition("\n\nDebug source")[0], secrets))


def _not_deleted(code: str, message: str, secrets: Iterable[str]) -> Refusal:
    """One of several objects was not deleted: S3 says so by a code, Azure by a status."""
    if code.isdigit():
        return _answered(int(code), "", message, secrets)
    return _answered(403 if "Denied" in code else 0, code, message, secrets)


def _answered(status: int, code: str, message: str, secrets: Iterable[str]) -> Refusal:
    words = " ".join(filter(None, [str(status or ""), code]))
    told = scrub(message.partition("RequestId:")[0], secrets).rstrip(".")
    why = _CODES.get(code) or _STATUSES.get(status) or (Why.BUSY if status >= 500 else Why.REFUSED)
    if why is Why.ABSENT and "bucket" in message.lower():
        why = Why.NO_BUCKET  # Google has no code for it
    if why is Why.DENIED and "failed to authenticate" in message:
        why = Why.BAD_CREDENTIALS  # Azure has one code for this and for what is forbidden
    may_act = why is Why.BUSY or (status >= 500 and why is not Why.REFUSED)
    return Refusal(why, f"{words}: {told}".removesuffix(": ") if words else told, code, may_act)


def _not_connected(text: str) -> Refusal:
    if "dns error" in text:
        return Refusal(Why.UNREACHABLE, "its name cannot be resolved")
    if "certificate" in text.lower() or "UnknownIssuer" in text:
        return Refusal(Why.UNTRUSTED, "its certificate is not trusted")
    if "InvalidContentType" in text:
        return Refusal(Why.UNTRUSTED, "it does not speak TLS (is it http://?)")
    detail = _OS_TEXT.search(text)
    return Refusal(Why.UNREACHABLE, detail[1].lower() if detail else "no connection")


def _not_answered(kind: str, text: str) -> Refusal:
    if "BadScheme" in text:
        return Refusal(Why.REFUSED, "http:// is not allowed here")
    if kind == "Timeout":
        return Refusal(Why.LATE, "no reply in time", may_act=True)
    detail = _OS_TEXT.search(text)
    return Refusal(Why.UNANSWERED, detail[1].lower() if detail else "the connection was cut", may_act=True)


_SENSITIVE = re.compile(
    r"(https?://[^\s?'\"<>]*)\?[^\s'\"<>]*"  # the query of a URL
    r"|\b[\w-]*(?:sig|credential|token|secret|key|password|sas)[\w-]*\s*[=:]\s*\S+"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"
    r"|\bya29\.\S+|\bBearer\s+\S+|\beyJ[\w-]{10,}\.\S+"
    r"|(?=[^\s'\"]*\d)[A-Za-z0-9+/_-]{20,}={0,2}",
    re.IGNORECASE,
)
_SHOWN_FROM = 2000
"""How much of a text is looked at: the patterns take time that grows with its square."""
_USER = re.compile(r"(https?://)[^/\s@]*@")


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """The text on one line, without the secrets, and without whatever else looks like one."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "...")
    text = text[:_SHOWN_FROM]
    text = _USER.sub(r"\1", text)
    text = _SENSITIVE.sub(lambda match: f"{match[1]}?..." if match[1] else "...", text)
    return " ".join(text.split())[:300]
