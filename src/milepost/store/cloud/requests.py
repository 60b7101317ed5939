"""Requests to an object store: asked again while that helps, and errors that say what, where and what to do."""

from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

from milepost.errors import AlreadyExists, CheckpointError, InvalidRequest, NoReply, StorageError
from milepost.store.cloud.advice import advice
from milepost.store.cloud.client import Clients
from milepost.store.cloud.options import CloudOptions
from milepost.store.cloud.replies import Refusal, Why, understand
from milepost.store.cloud.retry import Clock, Pace, Trial
from milepost.store.cloud.url import Bucket

Answer = TypeVar("Answer")
Ask = Callable[[Any], Answer]
Verb = Literal["get", "put", "list", "delete"]

_VERBS = {"get": "read", "put": "write", "list": "list", "delete": "delete"}
_DEFINITE = frozenset({Why.TAKEN, Why.ABSENT, Why.SHORT})


class BadReply(Exception):
    """A reply came, and is not what was asked for: another length, for example."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.refusal = Refusal(Why.DAMAGED, words)


class Asker:
    """Makes the requests of one store."""

    def __init__(self, place: Bucket, options: CloudOptions, clock: Clock | None = None) -> None:
        self.place, self.options = place, options
        self.clients = Clients(place, options)
        self.pace = Pace(options.requests, options.patience_s, clock)

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
        bulk: bool = True,
    ) -> Answer | Refusal:
        """Like `ask`, but returns a refusal that is `expected`. `bulk=False`: the client deletes one by one."""
        trial = Trial(self.pace)
        while True:
            answer = self._attempt(request, size_bytes, trial.timeouts, bulk=bulk)
            if not isinstance(answer, Refusal) or answer.why in expected:
                return answer
            pause = trial.failed(answer)
            if pause is None:
                break
            if answer.why in (Why.EXPIRED, Why.NO_CREDENTIALS):
                self.clients.forget()
            self.pace.clock.sleep(pause)
        raise self._error(verb, name, answer, trial)

    def _attempt(self, request: Ask[Answer], size_bytes: int, timeouts: int, *, bulk: bool) -> Answer | Refusal:
        """The answer or the refusal. The error itself ends here: its text holds whole replies."""
        with self.pace.turn():
            client = self.clients.get(size_bytes, timeouts=timeouts, bulk=bulk)
            try:
                answer = request(client)
            except CheckpointError:
                raise
            except BadReply as error:
                refusal = error.refusal
            except Exception as error:  # noqa: BLE001  # obstore raises OSError, ValueError and classes of its own
                refusal = self._understand(error)
            else:
                self.pace.answered()
                return answer
        if refusal.why in _DEFINITE:
            self.pace.answered()
        return refusal

    def _understand(self, error: Exception) -> Refusal:
        source = self.clients.source
        if source is not None and source.error is not None:
            if isinstance(source.error, InvalidRequest):
                raise source.error
            words = f"the callable for credentials raised {type(source.error).__name__}"
            return Refusal(Why.NO_CREDENTIALS, words)
        if not (type(error).__module__.startswith("obstore") or isinstance(error, (OSError, ValueError))):
            raise error
        return understand(str(error), self.options.secrets())

    def _error(self, verb: Verb, name: str, refusal: Refusal, trial: Trial) -> Exception:
        url = f"{self.place.url}/{name}" if name else self.place.url
        if refusal.why is Why.TAKEN:
            return AlreadyExists(f"{url} exists already")
        if refusal.why is Why.ABSENT and verb == "get":
            return FileNotFoundError(url)
        said = f"cannot {_VERBS[verb]} {url}: {refusal.words}"
        if trial.failures > 1:
            said += f" (asked {trial.failures} times in {self.pace.clock.now() - trial.began:.0f} s)"
        said += f". {advice(refusal, verb, self.place, self.options)}"
        if verb == "put" and trial.may_act:
            return NoReply(f"{said} Nobody knows whether the object was written, or still will be.")
        return StorageError(said)
