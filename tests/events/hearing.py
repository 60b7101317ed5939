"""What the tests of events share: a listener that keeps what it hears, and checks that events fit together."""

from collections import defaultdict

from milepost import events


class Heard(list):
    """Keeps all events. Used as a listener: `with listening() as heard:`."""

    def __call__(self, event):
        self.append(event)

    def of(self, kind):
        """The events of one class."""
        return [event for event in self if isinstance(event, kind)]

    def operations(self):
        """The events by operation, in the order in which these began."""
        found = defaultdict(list)
        for event in self:
            found[event.operation].append(event)
        return list(found.values())

    def phases(self, kind):
        """The names of the phases of all operations of a kind."""
        return {event.phase for event in self.of(events.PhaseEnded) if event.kind == kind}


class listening:
    """Listen inside the block."""

    def __enter__(self):
        heard = Heard()
        self._subscription = events.listen(heard)
        return heard

    def __exit__(self, *_):
        self._subscription.close()


def undisturbed(look, is_quiet, attempts=8):
    """What `look(attempt)` gives, the first time that it is quiet: on a busy machine anything may take a second.

    For times that must be short. If they counted what they must not, each attempt would say so: the last one is given.
    """
    for attempt in range(attempts):
        found = look(attempt)
        if is_quiet(found):
            break
    return found


def check_whole(operation):
    """The events of one operation on one rank begin, end, agree on what they are about, and their times fit."""
    first, last = operation[0], operation[-1]
    assert isinstance(first, events.Started), operation
    assert isinstance(last, events.Ended), operation
    assert sum(isinstance(event, events.Ended) for event in operation) == 1
    for name in ("kind", "url", "rank", "world", "step", "parent"):
        assert len({getattr(event, name) for event in operation}) == 1, name
    phases = [event for event in operation if isinstance(event, events.PhaseEnded)]
    for phase in phases:
        assert phase.start <= phase.end
        assert -0.001 <= phase.seconds <= phase.end - phase.start + 0.02
    own = sum(seconds for name, seconds in last.phases.items() if name != "blocking")
    assert own <= last.seconds + 0.02
    for name, seconds in last.phases.items():
        assert abs(seconds - sum(p.seconds for p in phases if p.phase == name)) < 0.01, name
    assert last.bytes == sum(p.bytes for p in phases)
    assert last.ok == (not any(isinstance(event, events.Failed) for event in operation))
