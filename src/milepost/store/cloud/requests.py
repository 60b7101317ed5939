"""Requests to an object store: asked again while that helps, and errors that say what, where and what to do."""

import logging
import os
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeVar

from milepost.errors import AlreadyExists, CheckpointError, InvalidRequest, NoReply, StorageError
from milepost.events.operation import current
from milepost.store.cloud.advice import advice
from milepost.store.cloud.client import Clients, Use, check_process, endpoint_of
from milepost.store.cloud.credentials import known_secrets
from milepost.store.cloud.options import CloudOptions
from milepost.store.cloud.replies import Refusal, Why, understand
from milepost.store.cloud.retry import Pace, Trial
from milepost.store.cloud.url import Bucket
from milepost.store.stopping import is_stopped

STEP_S = 0.5
_log = logging.getLogger("milepost")
Answer = TypeVar("Answer")
Ask = Callable[[Any], Answer]
Verb = Literal["get", "put", "list", "delete"]

_VERBS = {"get": "read", "put": "write", "list": "list", "delete": "delete"}
_MAY_ACT = "Nobody knows whether the object was written, or still will be."
_CALLABLE = re.compile(r"for path External \w+ credential provider")
"""In the text of obstore's error, if a callable for credentials failed. The words of the callable come after it."""
_UNSENT = "InvalidHeaderValue"
_DEFINITE = frozenset({Why.TAKEN, Why.ABSENT, Why.SHORT})


class BadReply(Exception):
    """A reply came, and is not what was asked for: another length, for example."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.refusal = Refusal(Why.DAMAGED, words)


def _is_refusal(error: BaseException) -> bool:
    """Whether it comes from obstore, which raises OSError, ValueError and classes of its own, and panics."""
    if isinstance(error, CheckpointError):
        return False
    of_obstore = type(error).__module__.startswith(("obstore", "pyo3_runtime"))
    return of_obstore or isinstance(error, (BadReply, OSError, ValueError))


class Service:
    """What all stores of one bucket share in this process: connections, and how fast they ask."""

    def __init__(self, place: Bucket, options: CloudOptions) -> None:
        self.clients = Clients(place, options)
        self.pace = Pace(options.requests, options.patience_s)
        self._lock = threading.Lock()
        self.endpoint = endpoint_of(place, options, os.environ)
        self._is_checked = place.provider != "s3" or not self.endpoint

    def take_check(self) -> bool:
        """Whether the caller is the first who should look if a second object of one name is refused.

        Of the providers themselves that is known.
        """
        with self._lock:
            is_first, self._is_checked = not self._is_checked, True
        return is_first

    def check_again(self) -> None:
        """The service did not refuse, or did not answer: the next who asks should look again."""
        self._is_checked = False


@lru_cache(maxsize=32)
def _service(place: Bucket, options: CloudOptions, environment: tuple[tuple[str, str], ...]) -> Service:
    del environment  # other credentials, or another endpoint, are another service
    return Service(place, options)


def service_of(place: Bucket, options: CloudOptions) -> Service:
    """The service of this bucket, with these options and the environment as it is now."""
    names = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "HOME")
    environment = sorted(one for one in os.environ.items() if one[0].startswith(names))
    bucket = replace(place, root="")
    try:
        return _service(bucket, options, tuple(environment))
    except TypeError:  # a callable for credentials that has no hash
        return Service(bucket, options)


class Asker:
    """Makes the requests of one store."""

    def __init__(self, place: Bucket, options: CloudOptions) -> None:
        self.place, self.options = place, options

    @cached_property
    def service(self) -> Service:
        """What this store shares with others, from the first request on."""
        return service_of(self.place, self.options)

    def ask(self, verb: Verb, name: str, request: Ask[Answer], *, size_bytes: int = 0) -> Answer:
        """The answer of `request(client)`, which is asked again while that may help.

        `size_bytes`: how much data it moves, which sets the time that it may take. Raises FileNotFoundError,
        AlreadyExists, StorageError, NoReply if a `put` may have taken effect, or InvalidRequest for a wrong setting.
        """
        answer = self.ask_or(frozenset(), verb, name, request, size_bytes=size_bytes)
        assert not isinstance(answer, Refusal)
        return answer

    def ask_or(
        self,
        expected: Collection[Why],
        verb: Verb,
        name: str,
        request: Ask[Answer],
        *,
        size_bytes: int = 0,
        use: Use | None = None,
    ) -> Answer | Refusal:
        """Like `ask`, but returns a refusal that is `expected`. `use`: which client, if the verb does not say."""
        check_process(self.place.url)  # before any lock: another process may have held it when it forked
        trial = Trial(self.service.pace)
        use = use or ("read" if verb in ("get", "list") else "write")
        while True:
            try:
                answer = self._attempt(request, use, size_bytes, trial.timeouts)
            except CheckpointError as error:  # a setting that went wrong meanwhile: a file of certificates is gone
                if verb == "put" and trial.may_act:
                    raise NoReply(f"{error} {_MAY_ACT}") from error
                raise
            if not isinstance(answer, Refusal) or answer.why in expected:
                return answer
            pause = trial.failed(answer)
            if pause is None or is_stopped():
                break
            if answer.why in (Why.EXPIRED, Why.NO_CREDENTIALS):
                self.service.clients.forget()
            if self.service.pace.should_tell(trial.began):
                _log.warning(
                    "%s has not done what was asked for %.0f s, and is asked again: %s",
                    self.place.url, self.service.pace.clock.now() - trial.began, answer.words,
                )  # fmt: skip
            operation = current()
            if operation is not None:
                operation.retried(verb, name, trial.failures, pause, answer.words)
            self._wait(pause)
        raise self._error(verb, name, answer, trial)

    def _wait(self, seconds: float) -> None:
        """Wait, in short steps: the call that this is for may end meanwhile."""
        while seconds > 0 and not is_stopped():
            self.service.pace.clock.sleep(min(seconds, STEP_S))
            seconds -= STEP_S

    def _attempt(self, request: Ask[Answer], use: Use, size_bytes: int, timeouts: int) -> Answer | Refusal:
        """The answer or the refusal. The error itself ends here: its text holds whole replies."""
        with self.service.pace.turn():
            if is_stopped():
                return Refusal(Why.REFUSED, "the call has ended")
            client = self.service.clients.get(use, size_bytes, timeouts=timeouts)
            try:
                answer = request(client)
            except BaseException as error:  # a panic is no Exception
                if not _is_refusal(error):
                    raise
                # Without its traceback: from here that would be a cycle, which keeps the caller's memory.
                problem = error.with_traceback(None)
            else:
                self.service.pace.answered()
                return answer
        # Behind the `except`: an error that is raised inside it would carry the other one, with its text.
        refusal = self._understand(problem)
        if refusal.why in _DEFINITE:
            self.service.pace.answered()
        return refusal

    def _understand(self, error: BaseException) -> Refusal:
        if isinstance(error, BadReply):
            return error.refusal
        if _CALLABLE.search(str(error)):
            source = self.service.clients.source  # none, if another request has just begun to renew it
            problem = source.error if source is not None else None
            if isinstance(problem, InvalidRequest):
                raise problem
            how = "failed" if problem is None else f"raised {type(problem).__name__}"
            return Refusal(Why.NO_CREDENTIALS, f"the callable for credentials {how}")
        refusal = understand(str(error), known_secrets(self.options, os.environ))
        # Where the client panics, the request may be under way; unless it could not even be made.
        unknown = not isinstance(error, Exception) and _UNSENT not in str(error)
        return replace(refusal, may_act=True) if unknown else refusal

    def _error(self, verb: Verb, name: str, refusal: Refusal, trial: Trial) -> Exception:
        url = f"{self.place.url}/{name}" if name else self.place.url
        if refusal.why is Why.TAKEN:
            return AlreadyExists(f"{url} exists already")
        if refusal.why is Why.ABSENT and verb == "get":
            return FileNotFoundError(url)
        said = f"cannot {_VERBS[verb]} {url}: {refusal.words}"
        if trial.failures > 1:
            said += f" (asked {trial.failures} times in {self.service.pace.clock.now() - trial.began:.0f} s)"
        said += f". {advice(refusal, verb, self.place, self.options, self.service.endpoint)}"
        if verb == "put" and trial.may_act:
            return NoReply(f"{said} {_MAY_ACT}")
        return StorageError(said)
